"""Draws the floors of the package, as pyproject.toml has them, into docs/floor-plan.svg.

With revisions it prints instead how many lines each room has in them: `floor_plan.py main HEAD`.
"""

import ast
import collections
import subprocess
import sys
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "floor-plan.svg"
_WIDTH, _GAP, _LINE, _SIZE = 920, 8, 17, 13


def floors() -> list[list[str]]:
    """The rooms of each floor, from the top."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    whole = project["tool"]["importlinter"]["contracts"][0]
    return [[room.strip() for room in floor.split("|")] for floor in whole["layers"]]


def purpose(room: str) -> str:
    """What a room is for: the first line of its file, or of its folder's `__init__.py`."""
    path = ROOT / "src" / "crossshard" / room
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
    words = first.split(": ", 1)[-1].replace("`", "")
    return words[0].upper() + words[1:]


def draw() -> str:
    """The picture: a row of boxes for each floor, the lowest at the bottom."""
    rows, top = [], _GAP
    for rooms in floors():
        width = (_WIDTH - _GAP * (len(rooms) + 1)) / len(rooms)
        texts = [textwrap.wrap(purpose(room), max(int((width - 20) / 7.2), 12)) for room in rooms]
        height = _LINE * (max(map(len, texts)) + 1) + 14
        for place, (room, text) in enumerate(zip(rooms, texts, strict=True)):
            left = _GAP + place * (width + _GAP)
            rows.append(_box(left, top, width, height, room, text))
        top += height + _GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" '
            f'font-family="sans-serif" font-size="{_SIZE}">',
            f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>',
            *rows,
            "</svg>\n",
        ]
    )


def _box(left: float, top: float, width: float, height: float, room: str, text: list[str]) -> str:
    lines = "".join(
        f'<tspan x="{left + 10:.0f}" dy="{_LINE}">{escape(line)}</tspan>' for line in text
    )
    return (
        f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{height}" rx="4" '
        f'fill="#eef3fa" stroke="#6b7f99"/>'
        f'<text x="{left + 10:.0f}" y="{top + _LINE + 3}" fill="#1b2733">'
        f'<tspan font-weight="bold">{escape(room)}</tspan>{lines}</text>'
    )


def lines_of_rooms(revision: str) -> dict[str, int]:
    """The lines of Python in each room, and in the folders beside the package."""
    git = lambda *words: (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    found: collections.Counter[str] = collections.Counter()
    for path in git("ls-tree", "-r", "--name-only", revision).splitlines():
        if path.endswith(".py"):
            parts = path.removesuffix(".py").split("/")
            room = "/".join(parts[:3]) if parts[0] == "src" else parts[0]
            found[room] += git("show", f"{revision}:{path}").count("\n")
    return {**found, "src": sum(n for room, n in found.items() if room.startswith("src"))}


def compare_lines(revisions: list[str]) -> str:
    """A table of the lines of all rooms in some revisions."""
    counts = [lines_of_rooms(revision) for revision in revisions]
    rows = [f"{'':32}" + "".join(f"{revision:>14.12}" for revision in revisions)]
    rooms = sorted({room for each in counts for room in each})
    rows += [
        f"{room:32}" + "".join(f"{each.get(room, 0):14,}" for each in counts) for room in rooms
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(compare_lines(sys.argv[1:]))
    else:
        PICTURE.write_text(draw(), encoding="utf-8")
        print(PICTURE.relative_to(ROOT))
