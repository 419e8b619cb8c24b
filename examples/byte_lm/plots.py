"""The plot of a run: training and held-out curves in bits per byte, with gzip's."""

import io
import os
import warnings

# Draws to a file only; an unknown backend in the user's environment would fail the import.
os.environ["MPLBACKEND"] = "agg"

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from examples.byte_lm.job import Job
from examples.byte_lm.record import Step
from examples.byte_lm.summary import Summary

_TRAIN, _HELD_OUT, _EMA, _GZIP = "#4477aa", "#cc3311", "#228833", "#666666"
_INK, _GRID = "#222222", "#e4e4e4"
# Evenly likely bytes need eight bits. Clip the curves of diverged runs.
_TOP = 10
# Letters, of each of the two in the title.
_WIDEST_NAME = 40


def draw_curves(job: Job, steps: list[Step], summary: Summary) -> bytes:
    """Bits per byte over steps, as a PNG file."""
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_training(axes, steps)
    key = "held_out_bits_per_byte"
    of_all, of_all_ema = summary.held_out_bits_per_byte, summary.held_out_bits_per_byte_ema
    _draw_held_out(axes, steps, key, of_all, "held-out", _HELD_OUT)
    _draw_held_out(axes, steps, f"{key}_ema", of_all_ema, "held-out, averaged parameters", _EMA)
    gzip = summary.gzip_bits_per_byte
    label = f"gzip -9 on the same held-out bytes: {gzip:.2f}"
    axes.axhline(gzip, color=_GZIP, linestyle=(0, (5, 3)), linewidth=1.3, label=label)
    plural = "s" * (job.shards > 1)
    title = f"{_short(job.inner.name)} on {job.shards} shard{plural}, {_short(job.text.name)}"
    # A dollar in a name does not begin a formula.
    axes.set_title(title, loc="left", color=_INK, fontsize=12, pad=12, parse_math=False)
    _frame(axes, len(steps))
    png = io.BytesIO()
    with warnings.catch_warnings():
        # A name may have signs that the font lacks; it is drawn with boxes for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(png, format="png")
    return png.getvalue()


def _draw_training(axes: Axes, steps: list[Step]) -> None:
    numbers = np.array([step["step"] for step in steps])
    bits = np.array([step["bits_per_byte"] for step in steps], float)
    axes.plot(numbers, bits, color=_TRAIN, linewidth=0.8, alpha=0.3)
    window = max(1, len(bits) // 25)
    smooth = np.convolve(bits, np.full(window, 1 / window), mode="valid")
    middles = numbers[: len(smooth)] + (window - 1) / 2
    mean = f", mean of {window} steps" if window > 1 else ""
    label = f"training{mean}: {smooth[-1]:.2f}"
    axes.plot(middles, smooth, color=_TRAIN, linewidth=1.8, label=label)


def _draw_held_out(
    axes: Axes, steps: list[Step], key: str, of_all: list[float], name: str, color: str
) -> None:
    points = {step["step"]: step[key] for step in steps if step.get(key)}
    if of_all:
        # The last point uses all held-out bytes, the others a sample.
        points[len(steps)] = of_all
    if not points:
        return
    finals = points[max(points)]
    label = f"{name}: {finals[0]:.2f}"
    if len(finals) > 1:
        label = f"{name}, {len(finals)} groups: {min(finals):.2f} to {max(finals):.2f}"
    for group in range(len(finals)):
        axes.plot(
            list(points),
            [bits[group] for bits in points.values()],
            color=color,
            linewidth=1.6,
            alpha=1 - 0.7 * group / len(finals),
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            label=label if group == 0 else None,
        )


def _short(name: str) -> str:
    """The end of a long name, so that the title fits the plot."""
    return name if len(name) <= _WIDEST_NAME else f"…{name[1 - _WIDEST_NAME :]}"


def _frame(axes: Axes, steps: int) -> None:
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("bits per byte", color=_INK)
    axes.set_xlim(0, max(2, steps) * 1.01)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(0, bottom), min(top, _TOP))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.legend(frameon=False, loc="upper right", labelcolor=_INK)
