"""Results as tables of text, for the screen and the page."""

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks import ema
from benchmarks.baselines import HAND_WRITTEN, OURS_AUTO, OURS_REPLICATED, OURS_SHARDED
from benchmarks.imports import WITH, WITHOUT
from benchmarks.options import Bench
from benchmarks.overhead import BARE, CALLED
from benchmarks.result import Result
from benchmarks.timing import Spread, Timing

_OURS = (OURS_AUTO, OURS_SHARDED, OURS_REPLICATED)
_TIMES = ("ms per step", "quartiles", "minimum")
_RATIOS = ("ours ÷ this", "quartiles", "minimum", "ratio of the minima")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
      title: the title.
      columns: the column headers.
      rows: the cells of each row.
      labels: the number of columns, from the left, with names rather than numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1

    def left(self) -> list[bool]:
        """Which columns are aligned left."""
        return [index < self.labels for index in range(len(self.columns))]


def make_tables(bench: Bench, results: Sequence[Result]) -> list[Table]:
    """The tables of a benchmark; none without results."""
    each = {
        "update": _of_update,
        "processes": _of_processes,
        "accumulation": _of_accumulation,
        "ema": _of_ema,
    }
    if bench in each:
        return [each[bench](result) for result in results]
    if not results:
        return []
    if bench == "step":
        return [_of_steps(results)]
    if bench == "overhead":
        return [_of_differences("Microseconds per call", results, CALLED, BARE, 1e6)]
    return [_of_differences("Milliseconds until imported", results, WITH, WITHOUT, 1e3)]


def _of_update(result: Result) -> Table:
    timing, floor = result.timing, result.floor_seconds
    assert floor is not None
    assert result.bandwidth is not None
    rows = []
    for name in timing.seconds:
        spread = timing.spread(name)
        rows.append(
            [
                name,
                *_milliseconds(spread),
                f"{spread.median / floor:.1f}",
                f"{spread.least / floor:.1f}",
                *_ratios(timing, name),
                f"{result.differences[name]:.0e}",
            ]
        )
    return Table(
        f"{result.title()}: lower bound {three_digits(1000 * floor)} ms "
        f"at {result.bandwidth / 1e9:.1f} GB/s",
        [
            "candidate",
            *_TIMES,
            "÷ lower bound",
            "minimum ÷ lower bound",
            *_RATIOS,
            "differs by",
        ],
        rows,
    )


def _of_processes(result: Result) -> Table:
    timing, ours = result.timing, (OURS_REPLICATED, OURS_SHARDED)
    rows = [
        [
            name,
            *_milliseconds(timing.spread(name)),
            *(cell for each in ours for cell in [*_ratio(timing.ratio(each, name))][:2]),
            f"{result.differences[name]:.0e}",
        ]
        for name in timing.seconds
    ]
    return Table(
        result.title(),
        [
            "candidate",
            *_TIMES,
            *(head for each in ours for head in (f"{each} ÷ this", "quartiles")),
            "differs by",
        ],
        rows,
    )


def _of_accumulation(result: Result) -> Table:
    timing = result.timing
    assert result.sent is not None
    assert result.least_sent is not None
    rows = [
        [
            name,
            *_milliseconds(timing.spread(name)),
            *_ratios(timing, name),
            three_digits(sent / 1e6),
            f"{sent / result.least_sent:.3f}",
            f"{result.differences[name]:.0e}",
        ]
        for name, sent in result.sent.items()
    ]
    return Table(
        result.title(),
        ["candidate", *_TIMES, *_RATIOS, "MB sent", "÷ lower bound", "differs by"],
        rows,
    )


def _of_ema(result: Result) -> Table:
    timing, held = result.timing, result.held
    assert held is not None
    rows = []
    for name in (OURS_SHARDED, OURS_REPLICATED, HAND_WRITTEN):
        without = ema.without_average(name)
        more = timing.difference(name, without).times(1000)
        rows.append(
            [
                name,
                *_milliseconds(timing.spread(name)),
                *_ratios(timing, name),
                three_digits(more.median),
                f"{three_digits(more.low)} to {three_digits(more.high)}",
                three_digits(1000 * timing.difference_of_minimums(name, without)),
                three_digits(held[name] / 1e6),
                three_digits((held[name] - held[without]) / 1e6),
            ]
        )
    return Table(
        result.title(),
        [
            "candidate",
            *_TIMES,
            *_RATIOS,
            "average costs, ms",
            "quartiles",
            "difference of the minima",
            "MB of state on one shard",
            "MB of average",
        ],
        rows,
    )


def _of_steps(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        timing = result.timing
        row = [result.problem, f"{result.parameters:,}", f"{result.shards}"]
        row += [three_digits(1000 * timing.spread(HAND_WRITTEN).median)]
        for name in _OURS:
            median, quartiles, _ = _ratio(timing.ratio(name, HAND_WRITTEN))
            row += [median, quartiles, f"{timing.ratio_of_minimums(name, HAND_WRITTEN):.2f}"]
        rows.append(row)
    spread = ["quartiles", "ratio of the minima"]
    return Table(
        "Time of a step, relative to one written by hand",
        [
            "problem",
            "parameters",
            "shards",
            "by hand, ms",
            *(head for name in _OURS for head in (f"{name} ÷ by hand", *spread)),
        ],
        rows,
    )


def _of_differences(
    title: str, results: Sequence[Result], ours: str, bare: str, unit: float
) -> Table:
    rows = []
    for result in results:
        timing = result.timing
        more = timing.difference(ours, bare).times(unit)
        rows.append(
            [
                result.title(),
                f"{timing.spread(bare).times(unit).median:.0f}",
                f"{timing.spread(ours).times(unit).median:.0f}",
                f"{more.median:.0f}",
                f"{more.low:.0f} to {more.high:.0f}",
                f"{more.least:.0f}",
                f"{unit * timing.difference_of_minimums(ours, bare):.0f}",
            ]
        )
    return Table(
        title,
        [
            "problem",
            bare,
            ours,
            "difference",
            "quartiles",
            "minimum",
            "difference of the minima",
        ],
        rows,
    )


def _milliseconds(spread: Spread) -> Iterator[str]:
    spread = spread.times(1000)
    yield three_digits(spread.median)
    yield f"{three_digits(spread.low)} to {three_digits(spread.high)}"
    yield three_digits(spread.least)


def _ratios(timing: Timing, name: str) -> Iterator[str]:
    yield from _ratio(timing.ratio(OURS_SHARDED, name))
    yield f"{timing.ratio_of_minimums(OURS_SHARDED, name):.2f}"


def _ratio(spread: Spread) -> Iterator[str]:
    yield f"{spread.median:.2f}"
    yield f"{spread.low:.2f} to {spread.high:.2f}"
    yield f"{spread.least:.2f}"


def three_digits(number: float) -> str:
    """Format with three significant digits, or all before the point."""
    size = abs(number)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{number:,.{decimals}f}"
