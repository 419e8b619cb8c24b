"""How some of the gallery draw: one chart on white, its axes named, as SVG or PNG."""

import os
from pathlib import Path

# Draws to a file only, whatever backend the user has set.
os.environ["MPLBACKEND"] = "agg"

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours that people who see no red or green tell apart (Okabe and Ito 2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#555555")
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"svg.hashsalt": "gallery", "figure.facecolor": "white", "axes.axisbelow": True}


def chart(x: str, y: str) -> tuple[Figure, Axes]:
    """An empty chart with names for its axes."""
    mpl.rcParams.update(STYLE)
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    return figure, axes


def save(figure: Figure, path: str) -> None:
    """Write it, the same bytes for the same numbers."""
    metadata = {"Date": None} if Path(path).suffix == ".svg" else {}
    figure.savefig(path, dpi=110, metadata=metadata)
    print(f"wrote {path}")
