"""Neighbours: the processes of a job on the same machine, whose deaths the machine tells."""

import contextlib
import hashlib
import os
import re
import socket
from pathlib import Path

_PROC = Path("/proc")


def machine() -> str:
    """A name of this machine, or of the container, in which process ids mean the same."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append((_PROC / "sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink(_PROC / "self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def own_identity() -> str:
    """The process id, and when the process began, since numbers are used again."""
    pid = os.getpid()
    return f"{pid} {_state_and_beginning(pid)[1]}"


def is_gone(identity: str) -> bool:
    """Whether the process of this identity has ended; not if the identity is not one."""
    found = re.fullmatch(r"(\d{1,9}) (\d{1,19})", identity[:40], re.ASCII)
    if found is None or int(found[1]) < 2:
        return False
    pid, began = int(found[1]), int(found[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    state, now_began = _state_and_beginning(pid)
    # A zombie has ended, and nobody has asked for its code yet.
    return state in ("Z", "X") or now_began != began


def _state_and_beginning(pid: int) -> tuple[str, int]:
    """Of proc(5): the state, and the beginning in clock ticks; nothing where there is no /proc."""
    if not _PROC.joinpath("self/stat").exists():
        return "", 0
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])
