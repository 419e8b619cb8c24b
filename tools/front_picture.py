"""Draws the front page's picture: `python tools/front_picture.py` trains, records and draws.

It runs the programs of the tutorial's first two pages, on one device with JAX and Optax alone and
on eight shards with crossshard: with their Adam, and with SGD, since Adam hides a wrong scale.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "tutorial" / name for name in ("1-one-device.md", "2-eight-shards.md")]
RECORD, PICTURE = (ROOT / "docs" / f"front-page.{kind}" for kind in ("json", "svg"))
ADAM = "optax.adam(1e-3)"
OPTIMIZERS = {"Adam": ADAM, "SGD": "optax.sgd(0.03, momentum=0.9)"}
ONE, EIGHT = "one device", "8 shards"

# Of each optimizer, and of one device and eight: the held-out loss after each tenth step.
Curves = dict[str, dict[str, list[tuple[int, float]]]]


def train() -> Curves:
    """The curves, which take a minute and a half on two cores."""
    from follow import blocks

    files = {kind: lines for page in PAGES for _, kind, lines in blocks(page)}
    curves: Curves = {}
    for name, optimizer in OPTIMIZERS.items():
        with tempfile.TemporaryDirectory() as folder:
            for file in ("sorting.py", "one_device.py", "train.py"):
                Path(folder, file).write_text(files[file].replace(ADAM, optimizer))
            for command in (["one_device.py"], ["train.py", "8"]):
                subprocess.run([sys.executable, *command], cwd=folder, check=True)
            curves[name] = {each: read(Path(folder, f"{each}.csv")) for each in (ONE, EIGHT)}
    return curves


def read(file: Path) -> list[tuple[int, float]]:
    """The curve that a program of the tutorial has written."""
    rows = (line.split() for line in file.read_text().splitlines())
    return [(int(float(step)), float(f"{float(loss):.9g}")) for step, loss in rows]


def recorded() -> Curves:
    """The curves of the last run, from docs/front-page.json."""
    curves: Curves = json.loads(RECORD.read_text(encoding="utf-8"))
    return curves


def furthest(curves: Curves) -> float:
    """The largest difference of two losses after the same step, in parts of the loss."""
    return max(
        abs(eight - one) / one
        for pair in curves.values()
        for (_, one), (_, eight) in zip(pair[ONE], pair[EIGHT], strict=True)
    )


def in_words(curves: Curves) -> str:
    """The picture, for readers who do not see it."""
    ends = " and ".join(f"{pair[ONE][-1][1]:.2g} with {name}" for name, pair in curves.items())
    return (
        f"The held-out loss of a small transformer falls, over 300 steps, to {ends}. The curves of "
        f"eight devices lie on those of one, within {_millionths(curves)} millionths."
    )


def _millionths(curves: Curves) -> int:
    return math.ceil(1e6 * furthest(curves))


# Lines that stand out from white as from black; only the words need to know which it is.
BAND, LINES = "#8c959f", ("#2f81d6", "#d9730d")
STYLE = (
    "text{fill:#57606a}.rule{stroke:#8c959f;stroke-opacity:.35}"
    "@media(prefers-color-scheme:dark){text{fill:#adbac7}}"
)
# Not wider than this, so that its words can be read on a phone.
WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 580, 72, 300
HIGHEST, LOWEST, STEPS = 2.0, 0.006, 300


def draw(curves: Curves) -> str:
    """The picture as SVG, without a background."""
    x = lambda step: LEFT + (RIGHT - LEFT) * step / STEPS
    tall = (BOTTOM - TOP) / math.log(HIGHEST / LOWEST)
    y = lambda loss: TOP + tall * math.log(HIGHEST / loss)
    text = lambda left, top, words, anchor="start", weight="normal": (
        f'<text x="{left:g}" y="{top:g}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )
    rule = lambda top: f'<line class="rule" x1="{LEFT}" x2="{RIGHT}" y1="{top:g}" y2="{top:g}"/>'

    def curve(points: list[tuple[float, float]], look: str) -> str:
        along = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
        return f'<polyline points="{along}" fill="none" stroke-linejoin="round" {look}/>'

    band = f'stroke="{BAND}" stroke-width="11" stroke-opacity=".45" stroke-linecap="round"'
    looks = [f'stroke="{color}" stroke-width="2.5"' for color in LINES]
    parts = [
        curve([(18, 19), (48, 19)], band),
        text(62, 24, "one device: JAX and Optax"),
        *(curve([(x, 19), (x + 16, 19)], look) for x, look in zip((334, 354), looks, strict=True)),
        text(380, 24, "eight devices: crossshard"),
        text(LEFT - 34, 56, "held-out loss"),
        text(RIGHT, 136, f"within {_millionths(curves)} millionths of each other", "end", "bold"),
    ]
    for loss in (1, 0.1, 0.01):
        parts += [rule(y(loss)), text(LEFT - 8, y(loss) + 5, f"{loss:g}", "end")]
    parts += [rule(BOTTOM)]
    parts += [text(x(step), BOTTOM + 24, f"{step}", "middle") for step in (0, 100, 200)]
    parts += [text(x(STEPS), BOTTOM + 24, "step 300", "middle")]
    for look, pair in zip(looks, curves.values(), strict=True):
        for name, its in ((ONE, band), (EIGHT, look)):
            parts += [curve([(x(step), y(loss)) for step, loss in pair[name]], its)]
    # From the lower end up, so that names do not meet.
    ends = sorted((pair[ONE][-1][1], name) for name, pair in curves.items())
    for place, (loss, name) in enumerate(ends):
        parts += [text(RIGHT + 10, y(loss) + 10 - 10 * place, name, weight="bold")]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" role="img" font-family="sans-serif" font-size="16">',
            f"<title>{escape(in_words(curves))}</title>",
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Train, write what was found and the picture, and print its words for the README."""
    curves = train()
    text = json.dumps(curves, indent=0, separators=(",", ":"))
    # A point on one line.
    RECORD.write_text(re.sub(r"\[\n(\d+),\n(\S+)\n\]", r"[\1,\2]", text) + "\n", encoding="utf-8")
    PICTURE.write_text(draw(recorded()), encoding="utf-8")
    print(in_words(recorded()))


if __name__ == "__main__":
    main()
