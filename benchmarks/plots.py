"""The plots of the benchmarks."""

import os
from collections.abc import Sequence
from pathlib import Path

# Draws to files only; an unknown backend in the user's environment would fail the import.
os.environ["MPLBACKEND"] = "agg"

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.baselines import HAND_WRITTEN, OURS_AUTO, OURS_SHARDED
from benchmarks.imports import WITH, WITHOUT
from benchmarks.options import Bench
from benchmarks.overhead import BARE, CALLED
from benchmarks.result import Result
from benchmarks.step import TRANSFORMER
from benchmarks.tables import three_digits

_OURS, _OTHERS, _FLOOR, _INK, _GRID = "#4477aa", "#b8bcc2", "#cc3311", "#222222", "#e4e4e4"
# By number of shards, from few to many.
_LINES = ("#88ccee", "#4477aa", "#aa3377", "#222255")


def draw(bench: Bench, results: Sequence[Result], path: Path) -> None:
    """Draw the results of a benchmark to a PNG file."""
    if not results:
        return
    figure = Figure(dpi=150, layout="constrained")
    if bench in ("update", "processes", "accumulation", "ema"):
        _draw_candidates(figure, results)
    elif bench == "step":
        _draw_steps(figure, results)
    elif bench == "overhead":
        title = "Time of calling our step beyond its compiled program"
        _draw_differences(figure, results, CALLED, BARE, (1e6, "microseconds a call"), title)
    else:
        title = "Import time of crossshard after JAX and Optax"
        _draw_differences(figure, results, WITH, WITHOUT, (1e3, "milliseconds"), title)
    figure.savefig(path)


def _draw_candidates(figure: Figure, results: Sequence[Result]) -> None:
    candidates = max(len(result.timing.seconds) for result in results)
    figure.set_size_inches(9, len(results) * (1.2 + 0.36 * candidates))
    for axes, result in zip(_column(figure, len(results)), results, strict=True):
        names = list(result.timing.seconds)
        spreads = [result.timing.spread(name).times(1000) for name in names]
        axes.barh(
            names,
            [spread.median for spread in spreads],
            height=0.62,
            color=[_OURS if name.startswith("ours") else _OTHERS for name in names],
            xerr=np.array([(s.median - s.low, s.high - s.median) for s in spreads]).T,
            error_kw={"ecolor": _INK, "elinewidth": 1, "capsize": 2.5},
        )
        for row, spread in enumerate(spreads):
            _label(axes, spread.high, row, three_digits(spread.median))
        floor = result.floor_seconds
        if floor is not None:
            axes.axvline(1000 * floor, color=_FLOOR, linewidth=1.3, linestyle=(0, (5, 3)))
            axes.annotate(
                f" lower bound: {1000 * floor:.3g}",
                (1000 * floor, 1),
                xycoords=("data", "axes fraction"),
                va="bottom",
                color=_FLOOR,
                fontsize=9,
            )
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(spread.high for spread in spreads))
        _frame(axes, result.title(), x="milliseconds per step: median and quartiles", y="")


def _draw_steps(figure: Figure, results: Sequence[Result]) -> None:
    figure.set_size_inches(10, 4.8)
    both = figure.subplots(1, 2, sharey=True)
    shards = sorted({result.shards for result in results if result.shards})
    colors = dict(zip(shards, _shades(len(shards)), strict=True))
    top = 1.0
    for axes, name in zip(both, (OURS_AUTO, OURS_SHARDED), strict=True):
        for count in shards:
            of_count = [result for result in results if result.shards == count]
            mlps = [result for result in of_count if result.problem != TRANSFORMER]
            top = max(top, *(r.timing.ratio(name, HAND_WRITTEN).high for r in of_count))
            label = f"{count} shard{'s' * (count > 1)}"
            _draw_ratios(axes, mlps, name, colors[count], label, "o-")
            others = [result for result in of_count if result.problem == TRANSFORMER]
            _draw_ratios(axes, others, name, colors[count], None, "D")
        axes.axhline(1, color=_FLOOR, linewidth=1.3, linestyle=(0, (5, 3)), zorder=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.xaxis.set_minor_formatter("")
        _frame(axes, name, x="parameters (MLPs; ◆ the demo's transformer)", y="", along="y")
    both[0].set_ylim(0, 1.08 * top)
    both[0].set_ylabel("time of ours ÷ time by hand", color=_INK)
    both[0].legend(frameon=False, loc="lower left", labelcolor=_INK)


def _draw_ratios(
    axes: Axes, results: Sequence[Result], name: str, color: str, label: str | None, form: str
) -> None:
    ratios = [result.timing.ratio(name, HAND_WRITTEN) for result in results]
    axes.errorbar(
        [result.parameters for result in results],
        [ratio.median for ratio in ratios],
        yerr=np.array([(r.median - r.low, r.high - r.median) for r in ratios]).reshape(-1, 2).T,
        fmt=form,
        color=color,
        label=label,
        linewidth=1.8,
        markersize=5.5,
        markeredgecolor="white",
        elinewidth=1,
        capsize=2.5,
    )


def _draw_differences(
    figure: Figure,
    results: Sequence[Result],
    ours: str,
    bare: str,
    unit: tuple[float, str],
    title: str,
) -> None:
    figure.set_size_inches(9, 1.3 + 0.5 * len(results))
    axes = figure.subplots()
    names = [result.title() for result in results]
    spreads = [result.timing.difference(ours, bare).times(unit[0]) for result in results]
    axes.barh(
        names,
        [spread.median for spread in spreads],
        height=0.55,
        color=_OURS,
        xerr=np.array([(s.median - s.low, s.high - s.median) for s in spreads]).T,
        error_kw={"ecolor": _INK, "elinewidth": 1, "capsize": 2.5},
    )
    for row, spread in enumerate(spreads):
        _label(axes, max(0, spread.high), row, f"{spread.median:.0f}")
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    _frame(axes, title, x=f"{unit[1]}: median and quartiles", y="")


def _column(figure: Figure, rows: int) -> list[Axes]:
    return list(figure.subplots(rows, 1, squeeze=False)[:, 0])


def _label(axes: Axes, x: float, row: int, text: str) -> None:
    axes.annotate(
        text, (x, row), (6, 0), textcoords="offset points", va="center", color=_INK, fontsize=9
    )


def _shades(number: int) -> list[str]:
    return [_LINES[index * len(_LINES) // max(number, len(_LINES))] for index in range(number)]


def _short(number: float, position: int | None = None) -> str:
    """10k, 1M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def _frame(axes: Axes, title: str, *, x: str, y: str, along: str = "x") -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11, pad=16)
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.grid(axis=along, color=_GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
