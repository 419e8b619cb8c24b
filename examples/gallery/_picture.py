"""How the gallery draws: one chart on white, its axes named, as SVG or PNG by the file's name.

`python examples/gallery/_picture.py clip clip.svg` runs an example, and draws its picture.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Draws to a file only, whatever backend the user has set.
os.environ["MPLBACKEND"] = "agg"

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours that most people who are colour-blind tell apart (Okabe and Ito 2008), and a grey.
COLORS, GREY = ("#0072b2", "#d55e00", "#009e73"), "#555555"
STYLE: dict[Any, Any] = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
# With a salt, the same numbers are the same bytes.
STYLE |= {"svg.hashsalt": "gallery", "figure.facecolor": "white", "axes.axisbelow": True}


def lines(
    path: str,
    names: tuple[str, str],
    curves: Mapping[str, Iterable[tuple[float, float]]],
    behind: Sequence[str] = (),
    bottom: float | None = 0,
    **options: Any,
) -> None:
    """Draw curves of points; those that are ``behind`` are broad and grey."""
    figure, axes = _chart(names)
    colors = iter(COLORS)
    for name, points in curves.items():
        broad: dict[str, Any] = {"color": GREY, "lw": 6, "alpha": 0.35}
        style = broad if name in behind else {"color": next(colors)}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set(**options)
    if bottom is not None:
        axes.set_ylim(bottom)
    _save(figure, axes, path)


def bars(
    path: str, names: tuple[str, str], groups: Mapping[str, Sequence[float]], even: float
) -> None:
    """Draw two groups of bars side by side, and a line for what would be even."""
    figure, axes = _chart(names)
    for place, (name, heights) in enumerate(groups.items()):
        at = [number + 0.4 * place - 0.2 for number in range(len(heights))]
        axes.bar(at, heights, width=0.38, color=COLORS[1 - place], label=name)
    axes.axhline(even, color=GREY, ls="--", label="even")
    axes.set_xticks(range(len(heights)))
    _save(figure, axes, path)


def _chart(names: tuple[str, str]) -> tuple[Figure, Axes]:
    mpl.rcParams.update(STYLE)
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot(xlabel=names[0], ylabel=names[1])
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure: Figure, axes: Axes, path: str) -> None:
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False)
    metadata = {"Date": None} if Path(path).suffix == ".svg" else {}
    figure.savefig(path, dpi=110, metadata=metadata)
    print(f"wrote {path}")


if __name__ == "__main__":
    example, file = sys.argv[1:]
    importlib.import_module(example).main(picture=file)
