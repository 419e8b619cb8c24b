"""Draws the diagrams in docs/concepts: `python tools/diagrams.py` writes them all."""

import ast
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "concepts"
WIDTH = 860
# A colour for each of four shards, one for what all share, one for what is not there.
SHARDS = ("#8ecae6", "#ffd28a", "#b5e2a8", "#e6b8d8")
SHARED, NOTHING = "#dfe5ec", "#ffffff"
LINE, INK = "#5b6b7d", "#16202b"


class Drawing:
    """An SVG picture that grows by boxes, arrows and words.

    Args:
      height: in the units of ``WIDTH``.
      words: what it shows, for readers who do not see it.
    """

    def __init__(self, height: int, words: str):
        self._height, self.words = height, words
        self._parts: list[str] = []

    def box(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        lines: str = "",
        fill: str = SHARED,
        dashed: bool = False,
    ) -> None:
        """A box with lines of text in its middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{LINE}"{dash}/>'
        )
        if lines:
            rows = lines.split("\n")
            first = top + height / 2 + 5 - 9 * (len(rows) - 1)
            for place, row in enumerate(rows):
                self.text(left + width / 2, first + 18 * place, row)

    def text(
        self, x: float, y: float, words: str, anchor: str = "middle", bold: bool = False
    ) -> None:
        """A line of text; ``anchor`` is ``"start"``, ``"middle"`` or ``"end"``."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{INK}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, *along: float) -> None:
        """An arrow along points: x, y, x, y, and so on."""
        points = " ".join(map("{:g}".format, along))
        self._parts.append(
            f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="1.6" '
            f'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The picture."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
                f'width="{WIDTH}" role="img" font-family="sans-serif" font-size="14">',
                f"<title>{escape(self.words)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/>'
                "</marker></defs>",
                f'<rect width="{WIDTH}" height="{self._height}" fill="#ffffff"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def shards() -> Drawing:
    """A batch is cut into the rows of four shards."""
    picture = Drawing(
        300,
        "A batch of 64 rows is cut into four parts of 16 rows. Each of four shards has the same "
        "parameters, and computes a gradient from its part. Their mean is the gradient of the "
        "whole batch, with which each shard takes the same step.",
    )
    picture.text(75, 24, "a batch, 64 rows", bold=True)
    picture.text(330, 24, "same parameters, own rows", bold=True)
    picture.text(640, 24, "the mean", bold=True)
    picture.text(785, 24, "the same step", bold=True)
    for place, colour in enumerate(SHARDS):
        top = 40 + 62 * place
        picture.box(15, top, 120, 62, f"rows {16 * place} to {16 * place + 15}", colour)
        picture.arrow(138, top + 31, 176, top + 31)
        picture.box(180, top + 8, 80, 46, f"shard {place}", colour)
        picture.arrow(262, top + 31, 298, top + 31)
        picture.box(302, top + 8, 170, 46, "loss and gradient\nof its 16 rows", colour)
        picture.arrow(474, top + 31, 568, 150 + 12 * place - 18)
        picture.arrow(712, 150 + 12 * place - 18, 736, top + 31)
        picture.box(740, top + 8, 100, 46, "update", colour)
    picture.box(572, 104, 138, 120, "the gradient of\nthe loss of\nall 64 rows")
    return picture


def stages() -> Drawing:
    """The way of a gradient through the stages."""
    picture = Drawing(
        250,
        "On each shard: local gradient, accumulate, quarantine, preprocess, weigh. Over all "
        "shards: the mean or the sum. The same on all shards: guard, wrapped optimizer, gather. "
        "Dashed stages run only where they are asked for.",
    )
    own = ("local\ngradient", "accumulate", "quarantine", "preprocess", "weigh")
    picture.text(15, 26, "on each shard, its own", "start", bold=True)
    for place, name in enumerate(own):
        left = 15 + 168 * place
        picture.box(left, 40, 140, 56, name, SHARDS[0], dashed=place > 0)
        if place:
            picture.arrow(left - 26, 68, left - 3, 68)
    picture.text(108, 146, "over all shards", "start", bold=True)
    picture.text(245, 146, "the same on all shards", "start", bold=True)
    common = ("mean or sum", "guard", "wrapped\noptimizer", "gather")
    for place, name in enumerate(common):
        left = 15 + 230 * min(place, 1) + 200 * max(place - 1, 0)
        fill = SHARDS[1] if place == 0 else SHARED
        picture.box(left, 158, 170, 56, name, fill, dashed=place in (1, 3))
        if place:
            picture.arrow(left - (56 if place == 1 else 26), 186, left - 3, 186)
    picture.arrow(757, 97, 757, 120, 100, 120, 100, 155)
    return picture


def losses() -> Drawing:
    """A loss over each shard's rows, and one over the batch."""
    picture = Drawing(
        310,
        'With loss_over="rows" each of four shards computes the loss of its rows, and the mean of '
        'the four is the loss of the batch. With loss_over="batch" one loss sees the rows of all '
        "shards, and XLA splits its work over them.",
    )
    picture.text(205, 24, 'loss_over="rows"', bold=True)
    picture.text(655, 24, 'loss_over="batch"', bold=True)
    for place, colour in enumerate(SHARDS):
        top = 40 + 62 * place
        picture.box(15, top, 90, 52, f"rows of\nshard {place}", colour)
        picture.arrow(107, top + 26, 138, top + 26)
        picture.box(142, top, 110, 52, f"loss_fn\non shard {place}", colour)
        picture.arrow(254, top + 26, 302, 138 + 8 * place)
        picture.box(465, top, 90, 52, f"rows of\nshard {place}", colour)
        picture.arrow(557, top + 26, 588, top + 26)
        picture.box(592, top, 110, 62 if place < 3 else 52, "", colour)
    picture.box(306, 118, 90, 64, "mean")
    picture.box(607, 126, 80, 64, "loss_fn\nonce", NOTHING)
    picture.arrow(704, 158, 750, 158)
    picture.box(754, 132, 90, 52, "the loss")
    picture.text(205, 302, "rows of other shards are never seen")
    picture.text(655, 302, "each row may meet all others")
    return picture


def state() -> Drawing:
    """Who has what of parameters and of the optimizer's state."""
    picture = Drawing(
        330,
        "Four ways to keep parameters and optimizer state on four shards. Replicated: each shard "
        "has all of both. Sharded update: all parameters, a quarter of the state. Sharded "
        "parameters: a quarter of both. Dealt out: all parameters, and the state of the matrices "
        "that the shard owns.",
    )
    ways = (
        ("replicated", "every shard updates", "all parameters", False, "whole"),
        ("sharded update", "each updates", "its slice", False, "slice"),
        ("dealt out", "each updates", "whole matrices", False, "owner"),
        ("sharded parameters", "each updates", "its slice", True, "slice"),
    )
    picture.text(15, 110, "parameters", "start", bold=True)
    picture.text(15, 220, "optimizer", "start", bold=True)
    picture.text(15, 238, "state", "start", bold=True)
    for column, (name, *updates, parts, kind) in enumerate(ways):
        left = 120 + 187 * column
        picture.text(left + 80, 24, name, bold=True)
        for place, colour in enumerate(SHARDS):
            x = left + 42 * place
            picture.text(x + 17, 48, str(place))
            for row in range(4):
                here = row == place
                picture.box(x, 58 + 24 * row, 34, 24, "", colour if here or not parts else NOTHING)
                if kind == "owner":
                    here = row == (2, 0, 3, 1)[place]  # owners need not be in order
                full = here or kind == "whole"
                picture.box(x, 178 + 24 * row, 34, 24, "", colour if full else NOTHING)
        for line, words in enumerate(updates):
            picture.text(left + 80, 298 + 18 * line, words)
    return picture


def communication() -> Drawing:
    """What a step sends, and when."""
    picture = Drawing(
        326,
        "Replicated: an all-reduce after the backward pass. Sharded update: a reduce-scatter, the "
        "update of a slice, an all-gather. Sharded parameters: layers are gathered in the forward "
        "pass, again in the backward pass if it recomputes them, and gradients are "
        "reduce-scattered.",
    )
    rows = (
        ("replicated", ("all-reduce", 2), ("", 0), "2(N−1)/N · P"),
        ("sharded update", ("reduce-scatter", 1), ("all-gather", 1), "2(N−1)/N · P"),
        ("sharded params", ("reduce-scatter", 1), ("", 0), "2 or 3(N−1)/N · P"),
    )
    for left, name in ((210, "forward"), (385, "backward"), (590, "update")):
        picture.text(left, 24, name, bold=True)
    picture.text(845, 24, "bytes sent", "end", bold=True)
    for row, (name, back, after, bytes_) in enumerate(rows):
        top = 44 + 84 * row
        picture.text(15, top + 24, name, "start", bold=True)
        picture.box(145, top, 130, 36)
        picture.box(280, top, 210, 36)
        picture.box(545, top, 90, 36, "its slice" if row else "all of it")
        if row == 2:
            picture.box(150, top + 40, 120, 24, "all-gather", SHARDS[0])
            picture.box(285, top + 40, 95, 24, "all-gather", SHARDS[0], dashed=True)
            picture.box(384, top + 40, 104, 24, back[0], SHARDS[1])
        else:
            picture.box(384, top + 40, 156, 24, back[0], SHARDS[1] if row else SHARDS[2])
        if after[1]:
            picture.box(639, top + 40, 90, 24, after[0], SHARDS[0])
        picture.text(845, top + 24, bytes_, "end")
    picture.text(15, 312, "P: the bytes of the parameters. N: shards.", "start")
    return picture


def floors() -> Drawing:
    """The floors of the package, as pyproject.toml has them: a row of rooms each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    rows, top = [], 8
    for rooms in ([room.strip() for room in floor.split("|")] for floor in layers):
        width = (WIDTH - 8) / len(rooms) - 8
        texts = [textwrap.wrap(_purpose(room), int((width - 20) / 7.6)) for room in rooms]
        height = 18 * max(map(len, texts)) + 32
        rows.append((top, width, height, list(zip(rooms, texts, strict=True))))
        top += height + 8
    picture = Drawing(top, "The floors of the package, tf1 at the top, errors at the bottom")
    for top, width, height, rooms_of_floor in rows:
        for place, (room, text) in enumerate(rooms_of_floor):
            left = 8 + place * (width + 8)
            picture.box(left, top, width, height)
            picture.text(left + 10, top + 20, room, "start", bold=True)
            for number, line in enumerate(text, 1):
                picture.text(left + 10, top + 20 + 18 * number, line, "start")
    return picture


def _purpose(room: str) -> str:
    """What a room is for: the first line of its file, or of its folder's `__init__.py`."""
    path = ROOT / "src" / "crossshard" / room
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
    words = first.split(": ", 1)[-1].replace("`", "")
    return words[0].upper() + words[1:]


DIAGRAMS: Sequence[Callable[[], Drawing]] = (
    shards,
    stages,
    losses,
    state,
    communication,
    floors,
)

if __name__ == "__main__":
    for diagram in DIAGRAMS:
        (FOLDER / f"{diagram.__name__}.svg").write_text(diagram().svg(), encoding="utf-8")
