"""Stacks: where the threads of this process stand, for the report of a stall. It opens no file."""

import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

NOWHERE = "nowhere"

_NOT_THE_USERS = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[2]), "<frozen"}
)


def place() -> str:
    """The line of the user's code at which the main thread stands, such as ``train.py:41``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return NOWHERE
    name = os.path.basename(frame.f_code.co_filename)
    # Others print it.
    return f"{name[-60:] if name.isprintable() else '_'}:{frame.f_lineno}"


def stacks() -> str:
    """The stacks of all threads but those of the watch, each from its innermost frame on."""
    main, own = threading.main_thread().ident, os.path.dirname(__file__)
    lines = []
    for thread, frame in sys._current_frames().items():
        found = list(_frames(frame))
        is_watch = any(f.f_code.co_filename == os.path.join(own, "watch.py") for f in found)
        if thread == main or not is_watch:
            lines.append("The main thread:" if thread == main else "Another thread:")
            lines += [f"  {_line(each)}" for each in found]
    return "\n".join(lines)


def _frames(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
