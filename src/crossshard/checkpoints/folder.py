"""Folder: numbered checkpoints, here or remote, and the lock of the one run that writes there.

Anybody may put anything into it, so nothing there is trusted.
"""

import contextlib
import datetime
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import stat
import threading
import time
import uuid
import warnings
import weakref
from pathlib import Path
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from crossshard import _check
from crossshard.distributed.agreement import exchange
from crossshard.distributed.identity import is_gone, machine, own_identity
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointError, CheckpointWarning

# Orbax writes it last. On a disk it also renames the folder of a checkpoint that is complete.
_MARKER = "commit_success.txt"
# In a checkpoint, the folder of the arrays, and that of the manifest and the notes beside it.
ARRAYS, NOTES = "state", "manifest"
_DIGITS = 8
_UNFINISHED = re.compile(r"\d{8,}\.(orbax-checkpoint-tmp.*|deleted)")
# The object store that both Orbax's library for paths and its library for arrays support.
_REMOTE = "gs://"
# A thousand times what the manifest of a large model needs. No file that is read at once may have
# more.
MOST_BYTES = 64 << 20
# The file that tells this run from others, if it has snapshots in memory.
_RUN = "run.txt"
# More than its 16 digits and a path have.
_MOST_OF_RUN = 8192
# The file that names the process which writes to the folder.
WRITER = "writer.json"
# How often a writer touches its file, and after how long without that it counts as dead, if it is
# on another machine.
_BEAT, _DEAD = 5.0, 30.0
# How long to look for it in another process: a file system may tell of a new file seconds late.
_LATE = 10.0
# Many times the length of what a writer writes there.
_MOST_OF_WRITER = 4096


class Damaged(Exception):
    """A checkpoint is not what was written; the text says what is wrong with it."""


class Folder:
    """A folder of checkpoints, ``00000100`` and so on.

    Attributes:
      path: where it is.
      remote: whether it is in an object store, which has no renames and no links.
    """

    def __init__(self, path: Any):
        try:
            text: Any = os.fspath(path)
            os.fsencode(text)
            self.remote: bool = text.startswith(_REMOTE)
            if not text or ("://" in text and not self.remote):
                raise ValueError("Orbax writes no arrays there")
            self.path: Any = epath.Path(text) if self.remote else Path(text).expanduser().resolve()
        except (TypeError, ValueError, RuntimeError) as error:
            kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
            raise kind(
                f"folder must be a path; got {_check.described(path)} ({error}). Pass one of this "
                f"machine, one that is mounted, or one at {_REMOTE}."
            ) from None

    def of(self, number: int) -> Any:
        """Return the folder of a checkpoint."""
        return self.path / f"{number:0{_DIGITS}d}"

    def note(self, number: int, name: str) -> Any:
        """Return a file of a checkpoint that holds no array: its manifest, or a note beside it."""
        return self.of(number) / NOTES / name

    def numbers(self, mesh: Mesh, *, create: bool = False) -> list[int]:
        """Return the numbers of complete checkpoints, ascending, as the first process sees them.

        Raises:
          CheckpointError: in every process, if the first cannot see them or create the folder.
        """
        own: Any = []
        if jax.process_index() == 0:
            try:
                if create:
                    self.path.mkdir(parents=True, exist_ok=True)
                own = self.newer(-1)
            except (OSError, ImportError) as error:  # of a bucket's library
                own = str(error)
        call = "Checkpoints" if create else "steps"
        first = json.loads(exchange(call, json.dumps(own), mesh)[0])
        if isinstance(first, str):
            raise CheckpointError(
                f"{self.path} cannot be used as a folder of checkpoints: {first}. Choose a folder "
                f"that this user may write to."
            )
        return [int(number) for number in first]

    def newer(self, number: int) -> list[int]:
        """Return the numbers of complete checkpoints above this one, as this process sees them."""
        newer = [each for each in self._numbered() if each > number]
        return [each for each in newer if not self.remote or self._committed(each)]

    def run(self, mesh: Mesh) -> str:
        """Return what tells the run of this folder from others; it is written at its first start.

        Raises:
          CheckpointError: in every process, if the first cannot read or write it.
        """
        own = ["", ""]
        if jax.process_index() == 0:
            try:
                own[0] = self._own_run()
            except (OSError, ValueError) as error:
                own[1] = str(error)
        run, why_not = json.loads(exchange("Checkpoints", json.dumps(own), mesh)[0])
        if why_not:
            raise CheckpointError(
                f"{self.path / _RUN}, which names the run of the snapshots, cannot be used: "
                f"{printable(why_not)}. Choose a folder that this user may write to, or delete "
                f"that file."
            )
        return str(run)

    def _own_run(self) -> str:
        """Return what names the run of this folder; a copy of a folder gets a name of its own."""
        path, run, where = self.path / _RUN, "", ""
        if path.exists():
            run, _, where = read(path, _MOST_OF_RUN).decode().partition("\n")
            if not re.fullmatch(r"[0-9a-f]{16}", run):
                raise ValueError("it has not 16 hexadecimal digits")
        first = self.path / where
        # A folder that was moved keeps its run, and so does one that has two paths.
        is_copy = bool(where) and where != str(self.path) and _has_run(first, run)
        if is_copy and (self.remote or not first.samefile(self.path)):
            run = ""
            warnings.warn(
                f"{self.path} is a copy of {printable(where)}. It is a run of its own from now on, "
                f"which does not go on from that one's snapshots. Give each run its own memory=, "
                f"or they delete each other's.",
                CheckpointWarning,
                stacklevel=4,
            )
        if not run or where != str(self.path):
            run = run or uuid.uuid4().hex[:16]
            path.write_text(f"{run}\n{self.path}")
        return run

    def _numbered(self) -> list[int]:
        names = {path.name for path in self.path.iterdir()}
        # Steps are counted in 32 bits. A folder with a larger number is somebody else's.
        numbers = {int(name) for name in names if re.fullmatch(r"\d{8,10}", name, re.ASCII)}
        return sorted(number for number in numbers if self.of(number).name in names)

    def _committed(self, number: int) -> bool:
        return bool((self.of(number) / _MARKER).is_file())

    def why_not_writable(self) -> str:
        """Return why nothing can be written; empty if it can, or if only trying tells."""
        if self.remote:
            return ""
        if not self.path.is_dir():
            return "the folder is gone"
        effective = os.access in os.supports_effective_ids
        may = os.access(self.path, os.W_OK | os.X_OK, effective_ids=effective)
        return "" if may else "the folder is read-only"

    def check(self, number: int) -> None:
        """Raise ``Damaged`` if a checkpoint is incomplete, or has links, devices or huge files."""
        try:
            top = self.of(number)
            # `rglob` does not follow links.
            for path in [] if self.remote else itertools.chain([top], top.rglob("*")):
                found, name = path.lstat(), path.relative_to(self.path)
                if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                    raise Damaged(f"{name} is a link or a device, which is not followed")
                # Arrays are read in pieces, other files at once.
                is_read_at_once = path.is_file() and path.parent.name != "d"
                if is_read_at_once and found.st_size > MOST_BYTES:
                    raise Damaged(f"{name} has {found.st_size:,} bytes")
            committed = self._committed(number)
        except OSError as error:
            raise Damaged(f"it cannot be read ({error})") from None
        if not committed:
            raise Damaged(f"it was not committed: {_MARKER} is missing")

    def delete(self, number: int) -> list[threading.Thread]:
        """Delete a checkpoint, if it is there; its name first, so that no half of one has a name.

        Returns the thread that deletes the rest. Raises OSError if it cannot be deleted.
        """
        doomed = self.of(number)
        try:
            if self.remote:
                (doomed / _MARKER).unlink()
            else:
                doomed = doomed.rename(doomed.with_suffix(".deleted"))
        except FileNotFoundError:
            return []
        deleting = threading.Thread(target=self._delete, args=(doomed,), name="crossshard")
        deleting.start()
        return [deleting]

    def delete_unfinished(self) -> None:
        """Delete what interrupted saves and deletions have left."""
        doomed = [path for path in self.path.iterdir() if _UNFINISHED.fullmatch(path.name)]
        if self.remote:
            doomed += [self.of(each) for each in self._numbered() if not self._committed(each)]
        for path in doomed:
            self._delete(path)

    def _delete(self, path: Any) -> None:
        if not self.remote:
            shutil.rmtree(path, ignore_errors=True)
        elif path.exists():
            path.rmtree()


def _has_run(folder: Any, run: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return read(folder / _RUN, _MOST_OF_RUN).decode().startswith(run)
    return False


def read(path: Any, most: int) -> bytes:
    """Return the bytes of a file; raise OSError if it has more, is no file, or is unreadable."""
    with open(path, "rb", opener=_open) if isinstance(path, Path) else path.open("rb") as opened:
        found: bytes = opened.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return found


def _open(path: str, flags: int) -> int:
    # To open a pipe that nobody writes to would block the process.
    found = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is a pipe, a device or a folder")
    return found


def read_json(path: Any, most: int) -> dict[str, Any]:
    """Return the JSON object in a file; raise as ``read`` does, or ValueError if there is none."""
    try:
        found = json.loads(read(path, most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def printable(text: str) -> str:
    r"""Return a text in which characters that might command a terminal are escaped.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def in_words(error: BaseException) -> str:
    """Return what went wrong, which TensorStore tells in the middle of a long text."""
    text = " ".join(str(error).split())
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
        if os.strerror(number) in text:
            full = number in (errno.ENOSPC, errno.EDQUOT)
            return f"{os.strerror(number)}{', the disk is full' if full else ''}"
    return f"{type(error).__name__}, {text:.300}"


# One writer.


class Lock:
    """The right to write to a folder, from ``take`` until ``release`` or the end of the process.

    It is a file that names the writer. One whose process has ended is taken over: at once on the
    same machine, and from another one after half a minute in which nobody has touched the file.

    Attributes:
      token: what the file says of this writer alone.
    """

    def __init__(self, folder: Any):
        self._path = folder / WRITER
        # There two writers can create the same file.
        self._remote = not isinstance(folder, Path)
        self.token = uuid.uuid4().hex
        self._release: Any = None

    @property
    def held(self) -> bool:
        """Whether it was taken, and not released."""
        return self._release is not None

    def take(self) -> str:
        """Take it, or keep it; return why that failed, or an empty text.

        Raises:
          OSError: the file cannot be written.
        """
        if self.held:
            holder = _writer(self._path)
            if holder.get("token") == self.token:
                return ""
            self.release()
            return f"{_name_of(holder)} has taken the folder over, as this process did not respond"
        process, began = own_identity().split()
        text = json.dumps(
            {
                "process": int(process),
                "began": int(began),
                "host": socket.gethostname(),
                "machine": machine(),
                "since": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
                "token": self.token,
            }
        )
        while not self._created(text):
            holder = _writer(self._path)
            if not self._is_dead(holder):
                return self._why_not_ours(holder)
            self._remove_unless_taken(holder)
        ended = threading.Event()
        own = self._path, self.token, ended
        threading.Thread(target=_beat, args=own, name="crossshard", daemon=True).start()
        # Also when nothing refers to the lock any longer, and at exit.
        self._release = weakref.finalize(self, _give_back, *own, os.getpid())
        return ""

    def sees(self, token: str) -> bool:
        """Return whether the file of the writer with this token is here, at once or late."""
        end = time.monotonic() + _LATE
        while _writer(self._path).get("token") != token:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def release(self) -> None:
        """Let others write."""
        if self._release is not None:
            self._release()
            self._release = None

    def _created(self, text: str) -> bool:
        if self._remote:
            if self._path.exists():
                return False
            self._path.write_text(text)
            # Of two that come at once, the later one has it.
            time.sleep(1)
            return bool(_writer(self._path).get("token") == self.token)
        try:
            with open(self._path, "x") as opened:
                opened.write(text)
        except FileExistsError:
            return False
        return True

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        if holder.get("machine") == machine():
            gone = is_gone(f"{holder.get('process')} {holder.get('began')}")
            if gone is not None:
                return gone
        # Clocks are not compared, since those of two machines may differ.
        before, end = self._touched(), time.monotonic() + _DEAD
        while before is not None and time.monotonic() < end:
            time.sleep(min(1.0, _BEAT))
            if self._touched() != before:
                return False
        return True

    def _touched(self) -> object:
        with contextlib.suppress(OSError):
            # A link is no writer's, whatever happens to the file that it leads to.
            found: Any = self._path.stat() if self._remote else self._path.lstat()
            return found.mtime if self._remote else found.st_mtime_ns
        return None

    def _remove_unless_taken(self, holder: dict[str, Any]) -> None:
        """Remove the file of a dead writer, unless somebody else was faster."""
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
            if not self._remote:
                folder = os.open(self._path.parent, os.O_RDONLY)
                stack.callback(os.close, folder)
                # Some file systems have no such locks; there only two that come at once collide.
                with contextlib.suppress(OSError):
                    fcntl.flock(folder, fcntl.LOCK_EX)
            if _writer(self._path) == holder:
                self._path.unlink()

    def _why_not_ours(self, holder: dict[str, Any]) -> str:
        if (holder.get("machine"), holder.get("process")) == (machine(), os.getpid()):
            return "another Checkpoints of this process writes there. Close that one first"
        here = holder.get("machine") == machine()
        then = "End it" if here else f"End it, or delete {self._path} if it has ended"
        return f"{_name_of(holder)} writes there. {then}, or choose another folder"


def _name_of(holder: dict[str, Any]) -> str:
    if not holder:
        return "a process that has not said its name"
    process, host, since = (holder.get(key) for key in ("process", "host", "since"))
    return printable(f"process {process!s:.20} on {host!s:.80}, which began at {since!s:.40},")


def _writer(path: Any) -> dict[str, Any]:
    """Return what a writer wrote; nothing if the file is gone, unfinished, or not a writer's."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(path, _MOST_OF_WRITER)
    return {}


def _beat(path: Any, token: str, ended: threading.Event) -> None:
    """Touch the file now and then, as long as it is this writer's."""
    while not ended.wait(_BEAT):
        with contextlib.suppress(OSError):
            if _writer(path).get("token") != token:
                return
            if isinstance(path, Path):
                os.utime(path)
            else:
                path.write_bytes(read(path, _MOST_OF_WRITER))


def _give_back(path: Any, token: str, ended: threading.Event, process: int) -> None:
    ended.set()
    # A child process that was forked has a copy of this.
    if os.getpid() == process and _writer(path).get("token") == token:
        with contextlib.suppress(OSError):
            path.unlink()
