"""The plot of a run: training and held-out curves in bits per byte, with gzip's."""

import io
import os

# Draws to a file only; an unknown backend in the user's environment would fail the import.
os.environ["MPLBACKEND"] = "agg"

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from examples.byte_lm.record import Step
from examples.byte_lm.summary import Summary

_TRAIN, _HELD_OUT, _EMA, _GZIP = "#4477aa", "#cc3311", "#228833", "#666666"
# Evenly likely bytes need eight bits. Clip the curves of diverged runs.
_TOP = 10


def draw_curves(steps: list[Step], summary: Summary) -> bytes:
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
    axes.axhline(gzip, color=_GZIP, linestyle="--", linewidth=1.3, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_xlim(0, max(2, len(steps)) * 1.01)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(0, bottom), min(top, _TOP))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    png = io.BytesIO()
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
    axes.plot(middles, smooth, color=_TRAIN, label=f"training{mean}: {smooth[-1]:.2f}")


def _draw_held_out(
    axes: Axes, steps: list[Step], key: str, of_all: float | None, name: str, color: str
) -> None:
    points = {step["step"]: step[key] for step in steps if key in step}
    if of_all is not None:
        # The last point uses all held-out bytes, the others a sample.
        points[len(steps)] = of_all
    if points:
        label = f"{name}: {points[max(points)]:.2f}"
        axes.plot(list(points), list(points.values()), "o-", color=color, label=label)
