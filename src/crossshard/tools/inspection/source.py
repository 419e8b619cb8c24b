"""Source lines: those in a program's tables, and which of them is in user code."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

_OURS = f"{Path(__file__).parents[2]}/"
# The frames that call our command are not user code.
_COMMAND = f"{_OURS}tools/cli.py:"

# The libraries that a training script calls, and the standard library.
_LIBRARIES = re.compile(
    r"/(site|dist)-packages/(equinox|flax|jax|jaxtyping|optax)/"
    r"|/lib/python3[^/]*/(?!site-packages/|dist-packages/)"
    r"|^<frozen "
)


def users_line(lines: Iterable[str]) -> str | None:
    """The first line in user code, outside crossshard and other libraries.

    Args:
      lines: as ``file:line``, innermost first.

    >>> users_line(["/lib/python3.11/site-packages/flax/nnx/norm.py:9", "train.py:12", "main.py:3"])
    'train.py:12'
    """
    return next((line for line in lines if not (_is_ours(line) or _LIBRARIES.search(line))), None)


def source_of(lines: Iterable[str]) -> str | None:
    """The line of user code, or if there is none, the first outside crossshard.

    ``None`` for a step of crossshard's that its command has lowered.
    """
    called = list(itertools.takewhile(lambda line: not line.startswith(_COMMAND), lines))
    return users_line(called) or next((line for line in called if not _is_ours(line)), None)


def _is_ours(line: str) -> bool:
    return line.startswith(_OURS) or "-packages/crossshard/" in line


def unescaped(text: str) -> str:
    """A text between quotes, without the backslashes."""
    return re.sub(r"\\(.)", r"\1", text)


def stack_frames(text: str) -> dict[int, tuple[str, int]]:
    """The tables that newer XLA writes above a program: each frame's line, and its caller."""
    names = re.finditer(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M)
    files = {m[1]: unescaped(m[2]) for m in names}
    location = r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"
    lines = {
        m[1]: f"{files.get(m[2], '?')}:{m[3]}"
        for m in re.finditer(location, _section(text, "FileLocations"), re.M)
    }
    frame = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    frames = re.findall(frame, _section(text, "StackFrames"), re.M)
    # XLA writes the caller's number plus one, so the outermost frame, which has no caller, appears
    # to call itself.
    offset = int(any(number == parent for number, _, parent in frames))
    return {
        int(number): (lines[where], int(parent or 0) - offset)
        for number, where, parent in frames
        if where in lines
    }


def _section(text: str, title: str) -> str:
    start = text.find(f"\n{title}\n")
    if start < 0:
        return ""
    start += len(title) + 2
    end = text.find("\n\n", start)
    return text[start : end if end >= 0 else None]
