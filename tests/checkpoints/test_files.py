"""What is in a folder of checkpoints is read with care: anybody may have put it there."""

import os
import threading
from pathlib import Path

import pytest

from crossshard.checkpoints.folder import printable, read, read_json

WRONG = {
    "a link": (lambda path: path.symlink_to(__file__), "symbolic"),
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
    found: list[str] = []

    def reads() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(OSError, match=says):
                read(tmp_path / "file", 8)
        # No descriptor is left.
        found.extend(os.listdir("/proc/self/fd")[before:] or ["refused"])

    reading = threading.Thread(target=reads, daemon=True)
    reading.start()
    reading.join(20)
    assert found == ["refused"]


def test_json_objects_alone_are_read(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text('{"a": 1}')
    assert read(file, 8) == b'{"a": 1}'
    assert read_json(file, 8) == {"a": 1}
    for text, says in (
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no JSON object"),
        ("{", "Expecting property name"),
        ("\xff", "can't decode"),
        ("", "Expecting value"),
    ):
        file.write_text(text, "latin-1")
        with pytest.raises(ValueError, match=says):
            read_json(file, 1 << 20)


def test_texts_are_printable():
    assert printable("é `w`") == "é `w`"
    assert printable("\x1b[2J\n\u202e\ud800") == r"\x1b[2J\n\u202e\ud800"
