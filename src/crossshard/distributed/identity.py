"""Identity: names this machine and its processes, and tells which of these have ended."""

import contextlib
import os
import re
import socket
from pathlib import Path

from crossshard._hash import sha256

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
