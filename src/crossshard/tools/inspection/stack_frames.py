"""Reads the tables of source lines and their callers, which newer XLA writes above a program."""

import re


def unescaped(text: str) -> str:
    """A text between quotes, without the backslashes."""
    return re.sub(r"\\(.)", r"\1", text)


def stack_frames(text: str) -> dict[int, tuple[str, int]]:
    """The stack frame tables: for each frame, its line and its caller."""
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
