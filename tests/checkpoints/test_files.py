"""What is in a folder of checkpoints is read with care: anybody may have put it there."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from crossshard.checkpoints.folder import printable, read, read_json


def test_a_file_is_read(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text('{"a": 1}')
    assert read(file, 8) == b'{"a": 1}'
    assert read_json(file, 8) == {"a": 1}


def link(path: Path) -> None:
    path.with_name("other").write_text("{}")
    path.symlink_to(path.with_name("other"))


WRONG = {
    "a link": (link, "symbolic"),
    "a pipe": (os.mkfifo, "a pipe, a device or a folder"),
    "a folder": (os.mkdir, "a pipe, a device or a folder"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "symbolic"),
    "a byte too many": (lambda path: path.write_bytes(b"x" * 9), "more than 8 bytes"),
    "nothing": (lambda path: None, "No such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_file_is_refused_at_once(name: str, tmp_path: Path):
    put, says = WRONG[name]
    put(tmp_path / "file")
    found: list[Any] = []

    def reads() -> None:
        with pytest.raises(OSError, match=says) as error:
            read(tmp_path / "file", 8)
        found.append(error)

    reading = threading.Thread(target=reads, daemon=True)
    reading.start()
    reading.join(20)
    assert found
    # No descriptor is left.
    (tmp_path / "good").touch()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match=says):
            read(tmp_path / "file", 8)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no JSON object"),
        ("{", "Expecting property name"),
        ("\xff", "can't decode"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_object_is_refused(text: str, says: str, tmp_path: Path):
    (tmp_path / "file").write_text(text, "latin-1")
    with pytest.raises(ValueError, match=says):
        read_json(tmp_path / "file", 1 << 20)


def test_texts_are_printable():
    assert printable("é `w`") == "é `w`"
    assert printable("\x1b[2J\n\u202e\ud800") == r"\x1b[2J\n\u202e\ud800"
