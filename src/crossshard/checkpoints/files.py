"""Files: reads what is in a folder of checkpoints, where anybody may have put anything."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any


def read(path: Any, most: int) -> bytes:
    """The bytes of a file.

    Args:
      path: where it is, on a disk or remote.
      most: how many bytes it may have.

    Raises:
      OSError: it cannot be read, is a link, a pipe or a device, or has more bytes.
    """
    with open(path, "rb", opener=_open) if isinstance(path, Path) else path.open("rb") as opened:
        found: bytes = opened.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return found


def read_json(path: Any, most: int) -> dict[str, Any]:
    """The JSON object in a file; raises as ``read``, and ValueError if there is none."""
    try:
        found = json.loads(read(path, most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def printable(text: str) -> str:
    r"""A text for a terminal, which other characters than these might command.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _open(path: str, flags: int) -> int:
    # A pipe that nobody writes to would keep the process.
    found = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is a pipe, a device or a folder")
    return found
