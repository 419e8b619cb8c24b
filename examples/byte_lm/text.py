"""Text to train on: the bytes of a file or folder, a part held out, and batches drawn from it."""

import dataclasses
import gzip
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from crossshard.errors import ArgumentError

HELD_OUT_FRACTION = 10
# Compared with gzip and evaluated at the end: more is slow on a CPU.
HELD_OUT_BYTES = 128 * 1024

_NOT_SOURCES = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclasses.dataclass(frozen=True)
class Text:
    """Training and held-out bytes.

    Attributes:
      name: a description.
      files: the number of files.
      training: uint8[bytes].
      ends: int[files], where each file ends, in bytes from the beginning of the first.
      held_out: uint8[bytes], at most ``HELD_OUT_BYTES``, never seen in training.
    """

    name: str
    files: int
    training: np.ndarray
    ends: np.ndarray
    held_out: np.ndarray


def read_text(path: Path | None, least: int) -> Text:
    """The text at ``path``, or the standard library's own sources if ``None``.

    Files are joined in the order of a hash of their names, so that the held-out part, the last
    tenth, is a mixture of them and the same in every run.

    Args:
      path: a file, or a folder of which hidden files and those with a zero byte are left out.
      least: the number of bytes that the training part must have.

    Raises:
      ArgumentError: the text is missing, unreadable or too small.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    files = _files(root, _NOT_SOURCES if path is None else set())
    files = [p for p in files if path is not None or p.suffix == ".py"]
    files.sort(key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    contents = [_read(file) for file in files]
    if files != [root]:
        # Like git and grep, take a file with a zero byte for binary.
        contents = [content for content in contents if b"\0" not in content[:8192]]
    if not contents:
        raise ArgumentError(f"There is no text file in {root}. Name another with --data.")
    everything = np.frombuffer(b"".join(contents), np.uint8)
    cut = len(everything) - len(everything) // HELD_OUT_FRACTION
    if cut < least or cut == len(everything):
        raise ArgumentError(
            f"{root} holds {len(everything)} bytes of text, and at least "
            f"{-(-least * HELD_OUT_FRACTION // (HELD_OUT_FRACTION - 1))} are needed to train with "
            f"this context and hold a tenth out. Use more text or a shorter --context."
        )
    name = f"the standard library of Python {platform.python_version()}"
    return Text(
        name if path is None else printable(path),
        len(contents),
        everything[:cut],
        np.cumsum([len(content) for content in contents]),
        everything[cut : cut + HELD_OUT_BYTES],
    )


def printable(path: Path) -> str:
    """A path as a terminal and a picture can show it, whatever bytes it is made of."""
    text = os.fsencode(path).decode(errors="replace")
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def batches(
    text: np.ndarray, batch: int, context: int, seed: int, ends: np.ndarray | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Endless global batches, the same for every number of shards.

    Args:
      text: uint8[bytes], of at least ``context + 1`` bytes.
      batch: the rows of a batch.
      context: the bytes of a row.
      seed: the seed of the row positions.
      ends: where the files in it end, if only the bytes up to the end of a row's file count.

    Yields:
      What is ``"read"`` and ``"wanted"``: two uint8[batch, context], one byte apart; with ``ends``,
      ``"counts"`` too, float32[batch, context], 1 for bytes that count.
    """
    generator = np.random.default_rng(seed)
    along = np.arange(context + 1)
    while True:
        starts = generator.integers(0, len(text) - context, size=(batch, 1))
        rows = text[starts + along]
        drawn = {"read": rows[:, :-1], "wanted": rows[:, 1:]}
        if ends is not None:
            end = ends[np.searchsorted(ends, starts, side="right")]
            drawn["counts"] = (starts + along[1:] < end).astype(np.float32)
        yield drawn


def gzip_bits_per_byte(text: np.ndarray) -> float:
    """The bits per byte of gzip at level 9, for uint8[bytes]."""
    return 8 * len(gzip.compress(text.tobytes(), 9)) / len(text)


def _files(root: Path, leave_out: set[str]) -> list[Path]:
    """The regular files at or below ``root``, hidden ones and those of some folders left out."""
    try:
        root.stat()
    except OSError as error:
        raise ArgumentError(f"Cannot read {root}: {error.strerror}.") from None
    if root.is_file():
        return [root]
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [each for each in folders if each[0] != "." and each not in leave_out]
        found += [Path(folder, name) for name in names if name[0] != "."]
    return [path for path in found if path.is_file()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"Cannot read {path}: {error.strerror}.") from None
