"""Folder: the numbered checkpoints in a folder, here or remote, and what may not leave it."""

import errno
import itertools
import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard.checkpoints.manifest import MOST_BYTES, Damaged
from crossshard.distributed.agreement import exchange
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointError

# Orbax writes it last. On a disk it also renames the folder of a checkpoint once that is complete.
_MARKER = "commit_success.txt"
_DIGITS = 8
_UNFINISHED = re.compile(r"\d{8,}\.(orbax-checkpoint-tmp.*|deleted)")
# What Orbax's library for paths and its library for arrays both know.
_REMOTE = "gs://"


class Folder:
    """A folder of checkpoints, ``00000100`` and so on.

    Attributes:
      path: where it is.
      remote: whether it is in an object store, which has no renames and no links.
    """

    def __init__(self, path: object):
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"folder must be a path; got {type(path).__name__}.")
        text = os.fspath(path)
        self.remote: bool = isinstance(text, str) and text.startswith(_REMOTE)
        if not isinstance(text, str) or ("://" in text and not self.remote) or not text:
            raise ArgumentError(
                f"folder must be a folder of this machine, one that is mounted, or one at "
                f"{_REMOTE}, where Orbax can write; got {text!r:.80}."
            )
        try:
            os.fsencode(text)
            self.path: Any = _remote(text) if self.remote else Path(text).expanduser().resolve()
        except (ValueError, RuntimeError) as error:
            raise ArgumentError(f"folder must be a path; got {text!r:.80} ({error}).") from None

    def of(self, number: int) -> Any:
        """The folder of a checkpoint."""
        return self.path / f"{number:0{_DIGITS}d}"

    def numbers(self, mesh: Mesh, *, create: bool = False) -> list[int]:
        """The numbers of the complete checkpoints, ascending, as the first process sees them.

        Args:
          mesh: the mesh whose processes ask.
          create: whether to create the folder if it does not exist.

        Raises:
          CheckpointError: it cannot see them, in every process.
        """
        own: Any = []
        if jax.process_index() == 0:
            try:
                if create:
                    self.path.mkdir(parents=True, exist_ok=True)
                own = [
                    each for each in self._numbered() if not self.remote or self._committed(each)
                ]
            except (OSError, ImportError) as error:
                own = str(error)
        first = json.loads(exchange("Checkpoints", json.dumps(own), mesh)[0])
        if isinstance(first, str):
            raise CheckpointError(
                f"{self.path} cannot be used as a folder of checkpoints: {first}. Choose a folder "
                f"that this user may write to."
            )
        return [int(number) for number in first]

    def _numbered(self) -> list[int]:
        names = (name for name in self._names() if re.fullmatch(r"\d{8,18}", name, re.ASCII))
        return sorted(int(name) for name in names if self.of(int(name)).name == name)

    def _committed(self, number: int) -> bool:
        return bool((self.of(number) / _MARKER).is_file())

    def why_not_writable(self) -> str:
        """The reason why nothing can be written; empty if it can, or if only trying tells."""
        if self.remote:
            return ""
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
            top = self.of(number)
            # `rglob` does not follow links.
            for path in [] if self.remote else itertools.chain([top], top.rglob("*")):
                found, name = path.lstat(), path.relative_to(self.path)
                if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                    raise Damaged(f"{name} is a link or a device, which is not followed")
                # Arrays are read in pieces, these at once.
                is_read_at_once = path.is_file() and path.parent.name != "d"
                if is_read_at_once and found.st_size > MOST_BYTES:
                    raise Damaged(f"{name} has {found.st_size:,} bytes")
            committed = self._committed(number)
        except OSError as error:
            raise Damaged(f"it cannot be read ({error})") from None
        if not committed:
            raise Damaged(f"it was not committed: {_MARKER} is missing")

    def take_out(self, number: int) -> Any:
        """Take a checkpoint's name from it, so that no half of it has it; the path to delete."""
        if self.remote:
            (self.of(number) / _MARKER).unlink()
            return self.of(number)
        doomed = self.of(number).with_suffix(".deleted")
        os.rename(self.of(number), doomed)
        return doomed

    def delete(self, path: Any) -> None:
        """Delete a folder in it, as far as that can be done."""
        if not self.remote:
            shutil.rmtree(path, ignore_errors=True)
        elif path.exists():
            path.rmtree()

    def delete_unfinished(self) -> None:
        """Delete what interrupted saves and deletions have left."""
        for name in self._names():
            if _UNFINISHED.fullmatch(name):
                self.delete(self.path / name)
        for number in self._numbered() if self.remote else []:
            if not self._committed(number):
                self.delete(self.of(number))

    def _names(self) -> list[str]:
        if self.remote:
            return [path.name for path in self.path.iterdir()]
        with os.scandir(self.path) as entries:
            return [entry.name for entry in entries]


def _remote(text: str) -> Any:
    # Here and not above: most folders are on a disk.
    from etils import epath

    return epath.Path(text)


def in_words(error: BaseException) -> str:
    """What went wrong; TensorStore tells it in the middle of a long text."""
    text = " ".join(str(error).split())
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
        if os.strerror(number) in text:
            full = number in (errno.ENOSPC, errno.EDQUOT)
            return f"{os.strerror(number)}{', the disk is full' if full else ''}"
    return f"{type(error).__name__}, {text:.300}"
