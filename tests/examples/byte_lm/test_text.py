"""Text: read alike everywhere, a tenth kept apart, batches that no number of shards changes."""

import itertools
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from crossshard.errors import ArgumentError
from examples.byte_lm.text import HELD_OUT_BYTES, batches, read_text


def test_a_file_is_split_into_nine_tenths_and_its_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)))
    text = read_text(path, 10)
    assert text.files == 1
    assert text.training.tolist() == list(range(180))
    assert text.held_out.tolist() == list(range(180, 200))


def test_a_folder_is_read_below_and_without_what_is_no_text(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "deep.md").write_text("d" * 300)
    (tmp_path / "top.txt").write_text("t" * 200)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0" + b"p" * 300)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("g" * 300)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    text = read_text(tmp_path, 10)
    assert text.files == 2
    everything = np.concatenate([text.training, text.held_out]).tobytes()
    assert sorted(set(everything)) == [ord("d"), ord("t")]
    assert len(everything) == 500


def test_the_order_of_files_depends_on_their_names_alone(tmp_path):
    for folder, names in (("one", "abcdefgh"), ("two", "hgfedcba")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(name * 50)
    one, two = (read_text(tmp_path / folder, 10) for folder in ("one", "two"))
    assert one.training.tobytes() == two.training.tobytes()
    assert one.held_out.tobytes() == two.held_out.tobytes()
    assert one.training.tobytes() != b"".join(bytes([n] * 50) for n in b"abcdefgh")[:360]


def test_by_default_it_is_the_standard_library_without_its_tests():
    text = read_text(None, 10)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    assert "standard library" in text.name
    assert text.files > 300
    assert len(text.held_out) == HELD_OUT_BYTES
    everything = text.training.tobytes()
    assert (stdlib / "argparse.py").read_bytes()[:2000] in everything
    own = next((stdlib / "test").glob("test_a*.py"), None)
    assert own is None or own.read_bytes() not in everything


def test_batches_are_windows_of_the_text_and_depend_on_the_seed_alone():
    text = np.arange(250, dtype=np.uint8)
    first = list(itertools.islice(batches(text, 6, 9, 3), 4))
    again = list(itertools.islice(batches(text, 6, 9, 3), 4))
    other = list(itertools.islice(batches(text, 6, 9, 4), 4))
    for one, same in zip(first, again, strict=True):
        read, wanted = one["read"], one["wanted"]
        assert read.shape == wanted.shape == (6, 9)
        assert read.dtype == np.uint8
        np.testing.assert_array_equal(read, same["read"])
        np.testing.assert_array_equal(wanted, same["wanted"])
        np.testing.assert_array_equal(wanted, read + 1)
    assert any((a["read"] != b["read"]).any() for a, b in zip(first, other, strict=True))


def test_every_window_can_be_drawn_even_if_there_is_only_one():
    drawn = next(batches(np.arange(5, dtype=np.uint8), 3, 4, 0))
    assert drawn["read"].tolist() == [[0, 1, 2, 3]] * 3
    assert drawn["wanted"].tolist() == [[1, 2, 3, 4]] * 3


def test_bytes_count_up_to_the_end_of_the_file_that_their_row_begins_in(tmp_path):
    for name, length in (("a", 7), ("b", 1), ("c", 60), ("d", 200)):
        (tmp_path / name).write_text(name * length)
    text = read_text(tmp_path, 10)
    drawn = next(batches(text.training, 300, 9, 0, text.ends))
    # The files hold one letter each.
    np.testing.assert_array_equal(drawn["counts"], drawn["wanted"] == drawn["read"][:, :1])
    assert 0 < (drawn["counts"] == 0).mean() < 0.5


def binaries(path: Path) -> None:
    path.mkdir()
    (path / "a.bin").write_bytes(bytes(1000))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda path: None, "{}: No such file"),
        (lambda path: path.mkdir(), "no text file in {}"),
        (binaries, "no text file in {}"),
        (lambda path: path.touch(), "{} holds 0 bytes"),
        (lambda path: path.write_text("too short"), "{} holds 9 bytes.* 56 are needed"),
        (os.mkfifo, "no text file in {}"),
    ],
    ids=["missing", "folder", "binaries", "empty", "short", "pipe"],
)
def test_what_cannot_be_trained_on_is_refused_by_name(tmp_path, make, names):
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(ArgumentError, match=names.format(path)):
        read_text(path, 50)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_file_that_fails_while_it_is_read_is_named():
    # Even root cannot read this one from its beginning.
    with pytest.raises(ArgumentError, match=r"/proc/self/mem: Input/output error"):
        read_text(Path("/proc/self/mem"), 50)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path):
    (tmp_path / "secret.txt").write_text("s" * 1000)
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(ArgumentError, match=r"secret.txt: Permission denied"):
        read_text(tmp_path, 50)
