"""Folder: the numbered checkpoints in a folder, and what may not leave it."""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from crossshard.checkpoints.manifest import MOST_BYTES, Damaged
from crossshard.errors import ArgumentError, ArgumentTypeError

# Orbax writes it last. It also renames the folder of a checkpoint once that is complete.
_MARKER = "commit_success.txt"
_DIGITS = 8
_UNFINISHED = re.compile(r"\d{8,}\.(orbax-checkpoint-tmp.*|deleted)")


class Folder:
    """A folder of checkpoints, ``00000100`` and so on."""

    def __init__(self, path: object):
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"folder must be a path; got {type(path).__name__}.")
        text = os.fspath(path)
        if not isinstance(text, str) or "://" in text or not text:
            raise ArgumentError(
                f"folder must be a folder of this machine or one that is mounted; got {text!r:.80}."
            )
        self.path = Path(text).expanduser().resolve()

    def of(self, number: int) -> Path:
        """The folder of a checkpoint."""
        return self.path / f"{number:0{_DIGITS}d}"

    def numbers(self) -> list[int]:
        """The numbers of the complete checkpoints, ascending."""
        names = (name for name in self._names() if re.fullmatch(r"\d{8,18}", name, re.ASCII))
        return sorted(int(name) for name in names if self.of(int(name)).name == name)

    def why_not_writable(self) -> str:
        """The reason why nothing can be written; empty if it can."""
        if not self.path.is_dir():
            return "the folder is gone" if not self.path.exists() else "it is no folder"
        effective = os.access in os.supports_effective_ids
        may = os.access(self.path, os.W_OK | os.X_OK, effective_ids=effective)
        return "" if may else "the folder is read-only"

    def check(self, number: int) -> None:
        """Raise unless a checkpoint was committed and keeps to its folder.

        Raises:
          Damaged: it is incomplete, holds a link or a device, or a file that is far too large.
        """
        try:
            for path, mode, size in _walk(self.of(number)):
                name = path.relative_to(self.path)
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise Damaged(f"{name} is a link or a device, which is not followed")
                # Arrays are read in pieces, these at once.
                if path.parent.name != "d" and stat.S_ISREG(mode) and size > MOST_BYTES:
                    raise Damaged(f"{name} has {size:,} bytes")
        except OSError as error:
            raise Damaged(f"it cannot be read ({error})") from None
        if not (self.of(number) / _MARKER).is_file():
            raise Damaged(f"it was not committed: {_MARKER} is missing")

    def delete(self, number: int) -> None:
        """Delete a checkpoint; if that is interrupted, no half of it has its name."""
        doomed = self.of(number).with_suffix(".deleted")
        os.rename(self.of(number), doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def delete_unfinished(self) -> None:
        """Delete what interrupted saves and deletions have left."""
        for name in self._names():
            if _UNFINISHED.fullmatch(name):
                shutil.rmtree(self.path / name, ignore_errors=True)

    def _names(self) -> list[str]:
        with os.scandir(self.path) as entries:
            return [entry.name for entry in entries]


def _walk(path: Path) -> Iterator[tuple[Path, int, int]]:
    """A path and all that is in it, with their modes and sizes; links are not followed."""
    found = os.lstat(path)
    yield path, found.st_mode, found.st_size
    if stat.S_ISDIR(found.st_mode):
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            yield from _walk(path / name)
