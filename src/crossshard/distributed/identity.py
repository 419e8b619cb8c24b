"""Identity: names this machine and its processes, and tells what has ended, and what is private."""

import contextlib
import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

from crossshard import _check
from crossshard._hash import sha256
from crossshard.errors import ArgumentError, ArgumentTypeError, DistributedError

_PROC = Path("/proc")


def machine() -> str:
    """Return a name of this machine, boot and container: process ids mean the same there."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append((_PROC / "sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink(_PROC / "self/ns/pid"))
    return sha256(parts)[:16]


def own_identity() -> str:
    """Return the process id, and when the process began, since ids are used again."""
    pid = os.getpid()
    return f"{pid} {_state_and_beginning(pid)[1]}"


def is_gone(identity: str) -> bool | None:
    """Return whether the process of this machine with this identity has ended.

    ``None`` if that is not known: the text is no identity, or a process has this id and the machine
    does not tell when it began.
    """
    found = re.fullmatch(r"([1-9]\d{0,8}) (\d{1,19})", identity[:40], re.ASCII)
    if found is None:
        return None
    pid, began = int(found[1]), int(found[2])
    state, now_began = _state_and_beginning(pid)
    # A zombie has ended, and its parent has not yet asked for its code.
    if state in ("Z", "X"):
        return True
    return now_began != began if began and now_began else None


def _state_and_beginning(pid: int) -> tuple[str, int]:
    """Return the state and the beginning, in clock ticks, of proc(5); or only whether it ended."""
    with contextlib.suppress(OSError):
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    try:
        os.kill(pid, 0)
    except OSError as error:
        return "X" if isinstance(error, ProcessLookupError) else "", 0
    return "", 0


def private_folder(name: str, folder: Any, example: str) -> Path:
    """Return a folder that is this user's alone; create it if it does not exist.

    Args:
      name: the name of the argument.
      folder: what the user passed.
      example: what he could pass, as Python.

    Raises:
      ArgumentError, ArgumentTypeError: it is no folder, or others may read or write it.
      DistributedError: it cannot be created.
    """
    try:
        path = Path(os.fspath(folder)).expanduser().absolute()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(
            f"{name} must be the path of a folder; got {_check.described(folder)} ({error}). Pass "
            f"one such as {example}."
        ) from None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except (OSError, ValueError) as error:
        raise DistributedError(
            f"The folder {path} cannot be used: {error}. Choose one that this user may write to."
        ) from None
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not own or found.st_mode & 0o077:
        raise ArgumentError(
            f"{path} is not a folder of this user alone: choose another one, or write chmod 700 "
            f"{path}."
        )
    return path
