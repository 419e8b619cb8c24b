"""Text to train on: the bytes of a file or folder, a part held out, and batches drawn from it."""

import dataclasses
import hashlib
import os
import platform
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from crossshard.errors import ArgumentError

HELD_OUT_FRACTION = 10
# Compared with gzip and evaluated at the end: more is slow on a CPU.
HELD_OUT_BYTES = 128 * 1024
# The text is kept in memory.
MOST_BYTES = 2 * 1024**3

_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


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
      path: a file, or a folder that is searched for text files.
      least: the number of bytes that the training part must have.

    Raises:
      ArgumentError: the text is missing, unreadable, too small or too large.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        name = f"the standard library of Python {platform.python_version()}"
        files = [p for p in _walk(root) if p.suffix == ".py" and _is_source(p.relative_to(root))]
    else:
        root, name = path, printable(path)
        files = [p for p in _walk(root) if p == root or _looks_like_text(p)]
    if not files:
        raise ArgumentError(f"There is no text file in {root}. Name another with --data.")
    _check_size(files, root)
    files.sort(key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    contents = [_read(file) for file in files]
    everything = np.frombuffer(b"".join(contents), np.uint8)
    cut = len(everything) - len(everything) // HELD_OUT_FRACTION
    if cut < least or cut == len(everything):
        raise ArgumentError(
            f"{root} holds {len(everything)} bytes of text, and at least "
            f"{-(-least * HELD_OUT_FRACTION // (HELD_OUT_FRACTION - 1))} are needed to train with "
            f"this context and hold a tenth out. Use more text or a shorter --context."
        )
    ends = np.cumsum([len(content) for content in contents])
    return Text(name, len(files), everything[:cut], ends, everything[cut : cut + HELD_OUT_BYTES])


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


def _walk(root: Path) -> list[Path]:
    """The regular files at or below ``root``, hidden ones left out."""
    try:
        mode = root.stat().st_mode
    except OSError as error:
        raise _cannot_read(root, error) from None
    if stat.S_ISREG(mode):
        return [root]
    if not stat.S_ISDIR(mode):
        raise ArgumentError(f"{root} is neither a file nor a folder.")
    found = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        found += [Path(folder, n) for n in sorted(names) if not n.startswith(".")]
    return [p for p in found if p.is_file()]


def _is_source(inside: Path) -> bool:
    return not _NOT_SOURCES & set(inside.parts[:-1])


def _looks_like_text(path: Path) -> bool:
    # Like git and grep, take a file with a zero byte for binary.
    return b"\0" not in _read(path, 8192)


def _check_size(files: list[Path], root: Path) -> None:
    size = sum(p.stat().st_size for p in files)
    if size > MOST_BYTES:
        raise ArgumentError(
            f"{root} holds {size / 2**30:.1f} GiB of text, and at most {MOST_BYTES >> 30} GiB fit: "
            f"all of it is kept in memory. Name a part of it with --data."
        )


def _read(path: Path, limit: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise _cannot_read(path, error) from None


def _refuse(error: OSError) -> None:
    raise _cannot_read(error.filename, error) from None


def _cannot_read(path: Path, error: OSError) -> ArgumentError:
    return ArgumentError(f"Cannot read {path}: {error.strerror}.")
