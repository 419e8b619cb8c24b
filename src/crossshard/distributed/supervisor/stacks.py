"""Stacks: where the threads of this process stand, for the report of a stall. It opens no file."""

import os
import re
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

NOWHERE = "nowhere"
# What other processes take for a place, too.
PLACE = r"[\w.<>-]{1,60}:\d{1,7}"

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
    name = re.sub(r"[^\w.<>-]", "_", os.path.basename(frame.f_code.co_filename), flags=re.ASCII)
    return f"{name[-60:] or '_'}:{frame.f_lineno}"


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
