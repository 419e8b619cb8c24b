"""Lock: one process writes to a folder of checkpoints, and others are told which one."""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

from crossshard.checkpoints.folder import printable, read, read_json
from crossshard.distributed.identity import is_gone, machine, own_identity

FILE = "writer.json"
# A writer touches its file so often. One on another machine that has not for so long is dead.
_BEAT, _DEAD = 5.0, 30.0
# Many times what a writer writes down.
_MOST_BYTES = 4096


class Lock:
    """The right to write to a folder, from ``take`` until ``release`` or the end of the process.

    It is a file that names the writer. One whose process has ended is taken over: at once on the
    same machine, and from another one after half a minute in which nobody has touched the file.
    """

    def __init__(self, folder: Any):
        self._path = folder / FILE
        # Where no file can be created by only one of two that try.
        self._remote = not isinstance(folder, Path)
        self._token = uuid.uuid4().hex
        self._release: Any = None

    def take(self) -> str:
        """The reason why another one has it; empty if it is ours, from now on or from before.

        Raises:
          OSError: the file cannot be written.
        """
        if self._release is not None:
            holder = _read(self._path)
            if holder.get("token") == self._token:
                return ""
            self.release()
            return f"{_named(holder)} has taken the folder over, as this process did not respond"
        process, began = own_identity().split()
        text = json.dumps(
            {
                "process": int(process),
                "began": int(began),
                "host": socket.gethostname(),
                "machine": machine(),
                "since": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
                "token": self._token,
            }
        )
        while not self._created(text):
            holder = _read(self._path)
            if not self._is_dead(holder):
                return self._whose(holder)
            self._take_away(holder)
        ended = threading.Event()
        own = self._path, self._token, ended
        threading.Thread(target=_beat, args=own, name="crossshard", daemon=True).start()
        # Also when nobody refers to it any longer, and at exit.
        self._release = weakref.finalize(self, _give_back, *own, os.getpid())
        return ""

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
            # Of two that come at once the later one has it.
            time.sleep(1)
            return bool(_read(self._path).get("token") == self._token)
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
        # Without a look at clocks, which may differ.
        before, end = self._touched(), time.monotonic() + _DEAD
        while before is not None and time.monotonic() < end:
            time.sleep(min(1.0, _BEAT))
            if self._touched() != before:
                return False
        return True

    def _touched(self) -> object:
        with contextlib.suppress(OSError):
            # A link is no writer's, whatever becomes of what it leads to.
            found: Any = self._path.stat() if self._remote else self._path.lstat()
            return found.mtime if self._remote else found.st_mtime_ns
        return None

    def _take_away(self, holder: dict[str, Any]) -> None:
        """Remove the file of a dead writer, unless somebody else was faster."""
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
            if not self._remote:
                folder = os.open(self._path.parent, os.O_RDONLY)
                stack.callback(os.close, folder)
                # Some file systems have no such locks; then two would have to come at once.
                with contextlib.suppress(OSError):
                    fcntl.flock(folder, fcntl.LOCK_EX)
            if _read(self._path) == holder:
                self._path.unlink()

    def _whose(self, holder: dict[str, Any]) -> str:
        if (holder.get("machine"), holder.get("process")) == (machine(), os.getpid()):
            return "another Checkpoints of this process writes there. Close that one first"
        here = holder.get("machine") == machine()
        then = "End it" if here else f"End it, or delete {self._path} if it has ended"
        return f"{_named(holder)} writes there. {then}, or choose another folder"


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return "a process that has not said its name"
    process, host, since = (holder.get(key) for key in ("process", "host", "since"))
    return printable(f"process {process!s:.20} on {host!s:.80}, which began at {since!s:.40},")


def _read(path: Any) -> dict[str, Any]:
    """What a writer wrote down; nothing if it is writing, or the file is gone or something else."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(path, _MOST_BYTES)
    return {}


def _beat(path: Any, token: str, ended: threading.Event) -> None:
    """Touch the file now and then, as long as it is this writer's."""
    while not ended.wait(_BEAT):
        with contextlib.suppress(OSError):
            if _read(path).get("token") != token:
                return
            if isinstance(path, Path):
                os.utime(path)
            else:
                path.write_bytes(read(path, _MOST_BYTES))


def _give_back(path: Any, token: str, ended: threading.Event, process: int) -> None:
    ended.set()
    # A child process that was forked has a copy of this.
    if os.getpid() == process and _read(path).get("token") == token:
        with contextlib.suppress(OSError):
            path.unlink()
