"""The picture of a plan: bars of memory and of estimated time."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crossshard.plans.report import Candidate, Plan, size, time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GRID, _LIMIT = "#222222", "#e4e4e4", "#cc3311"
_MEMORY = {
    "parameters": "#222255",
    "optimizer state": "#4477aa",
    "other": "#88ccee",
    "temporaries": "#b8bcc2",
    "not told apart": "#e4e4e4",
}
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
_TIME = {
    "compute": "#4477aa",
    "memory": "#88ccee",
    "communication": "#aa3377",
    "calls": "#b8bcc2",
}


def draw(plan: Plan, path: Path) -> None:
    """Draw a plan to a file: what each candidate needs of a device's memory, and its time."""
    # Draws to files only; an unknown backend in the user's environment would fail the import.
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.1 + 0.62 * len(plan.candidates)), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [each.name for each in plan.candidates]
    available = plan.candidates[0].memory.available
    most = max(each.memory.needed for each in plan.candidates)
    unit, unit_name = _unit(most, _BYTES)
    slowest = max((each.seconds.step for each in plan.candidates if each.seconds), default=1)
    second, second_name = _unit(slowest, _SECONDS)
    for place, each in enumerate(plan.candidates):
        _memory_bar(left, place, each, unit)
        _time_bars(right, place, each, second)
    # Where all need little, the line would leave no room for the bars.
    shows_limit = 20 * most > available
    if shows_limit:
        left.axvline(available / unit, color=_LIMIT, linewidth=1.3, linestyle=(0, (5, 3)))
        left.annotate(
            f"a device has {size(available)} ",
            (available / unit, 1),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="bottom",
            color=_LIMIT,
            fontsize=9,
        )
    left.set_xlim(0, 1.35 * max(most, available if shows_limit else 0) / unit)
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    if plan.recommended is not None:
        left.get_yticklabels()[plan.recommended].set_fontweight("bold")
    right.margins(x=0.3)
    _frame(left, f"Memory of a device, in {unit_name}", _MEMORY)
    _frame(right, f"Estimated time of a step, in {second_name}", _TIME)
    figure.suptitle(
        f"{plan.parameters:,} parameters on {plan.topology}", x=0.01, ha="left", color=_INK
    )
    figure.savefig(path)


def _unit(most: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next((each for each in units if most >= each[0]), units[-1])


def _memory_bar(axes: "Axes", place: int, each: Candidate, unit: float) -> None:
    use = each.memory
    known = use.parameters + use.optimizer_state + use.other
    rest = use.temporaries if use.temporaries is not None else 0
    parts = {
        "parameters": use.parameters,
        "optimizer state": use.optimizer_state,
        "other": use.other,
        "temporaries": rest,
        "not told apart": max(0, use.needed - known - rest),
    }
    start = 0.0
    for name, number in parts.items():
        axes.barh(place, number / unit, left=start, height=0.6, color=_MEMORY[name])
        start += number / unit
    text = size(use.needed) + ("" if each.fits else ": does not fit")
    _label(axes, start, place, text, _INK if each.fits else _LIMIT)


def _time_bars(axes: "Axes", place: int, each: Candidate, unit: float) -> None:
    if each.seconds is None:
        _label(axes, 0, place, "the compiler refused it", _LIMIT)
        return
    parts = {name: getattr(each.seconds, name) for name in _TIME}
    height = 0.6 / len(parts)
    for row, (name, seconds) in enumerate(parts.items()):
        where = place - 0.3 + (row + 0.5) * height
        axes.barh(where, seconds / unit, height=0.9 * height, color=_TIME[name])
    _label(axes, max(parts.values()) / unit, place, f"step: {time(each.seconds.step)}", _INK)


def _label(axes: "Axes", x: float, row: float, text: str, color: str) -> None:
    axes.annotate(
        text,
        (x, row),
        (5, 0),
        textcoords="offset points",
        va="center",
        color=color,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _frame(axes: "Axes", title: str, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    axes.set_title(title, loc="left", color=_INK, fontsize=11, pad=16)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.legend(
        handles=[Patch(color=color, label=name) for name, color in colors.items()],
        loc="upper left",
        bbox_to_anchor=(0, -0.1),
        ncols=3,
        frameon=False,
        fontsize=8,
        labelcolor=_INK,
    )
