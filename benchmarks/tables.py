"""Results as tables of text, for the screen and the page."""

import dataclasses
from collections.abc import Callable, Sequence

from benchmarks import ema
from benchmarks.baselines import (
    HAND_WRITTEN,
    OURS_AUTO,
    OURS_PARAMS_SHARDED,
    OURS_REPLICATED,
    OURS_SHARDED,
)
from benchmarks.imports import WITH, WITHOUT
from benchmarks.options import Bench
from benchmarks.overhead import BARE, CALLED
from benchmarks.result import Result
from benchmarks.timing import Spread

# The title of a bench that times ours beside what it stands on, these two, and units per second.
_BESIDE: dict[Bench, tuple[str, str, str, float]] = {
    "overhead": ("Microseconds per call", CALLED, BARE, 1e6),
    "import": ("Milliseconds until imported", WITH, WITHOUT, 1e3),
}
# A heading, and a cell for each row.
Column = tuple[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text: its title, the headings of its columns, and the cells of each row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def make_tables(bench: Bench, results: Sequence[Result]) -> list[Table]:
    """The tables of a benchmark; none without results."""
    if bench == "step":
        return [_of_steps(results)] if results else []
    if bench in _BESIDE:
        return [_of_differences(results, *_BESIDE[bench])] if results else []
    return [_of_candidates(bench, result) for result in results]


def _of_candidates(bench: Bench, result: Result) -> Table:
    timing, title = result.timing, result.title()
    names = [name for name in timing.seconds if not ema.is_without_average(name)]
    columns: list[Column] = [("candidate", names)]
    times = [timing.spread(name).times(1000) for name in names]
    columns += _spreads("ms per step", times, three_digits)
    floor = result.floor_seconds
    if floor is not None and result.bandwidth is not None:
        bandwidth = f"{result.bandwidth / 1e9:.1f} GB/s"
        title += f": lower bound {three_digits(1000 * floor)} ms at {bandwidth}"
        columns.append(("÷ lower bound", [f"{each.median / 1000 / floor:.1f}" for each in times]))
        minima = [f"{each.least / 1000 / floor:.1f}" for each in times]
        columns.append(("minimum ÷ lower bound", minima))
    if bench == "processes":
        for ours in filter(timing.seconds.get, (OURS_REPLICATED, OURS_SHARDED)):
            ratios = [timing.ratio(ours, name) for name in names]
            columns += _spreads(f"{ours} ÷ this", ratios, _two_decimals)[:2]
    else:
        ours = OURS_PARAMS_SHARDED if bench == "parts" else OURS_SHARDED
        columns += _ratios("ours ÷ this", result, [(ours, name) for name in names])
    if bench == "ema":
        columns += _of_average(result, names)
    if result.of_parameters is not None and result.held is not None:
        held = [(result.of_parameters[name], result.held[name]) for name in names]
        columns.append(("MB of parameters", [three_digits(each / 1e6) for each, _ in held]))
        columns.append(("MB of state", [three_digits(each / 1e6) for _, each in held]))
        columns.append(("MB on one device", [three_digits(sum(each) / 1e6) for each in held]))
    if result.sent is not None and result.least_sent is not None:
        sent = [result.sent[name] for name in names]
        columns.append(("MB sent", [three_digits(each / 1e6) for each in sent]))
        columns.append(("÷ lower bound", [f"{each / result.least_sent:.3f}" for each in sent]))
    if result.compiling is not None:
        columns.append(("s to compile", [f"{result.compiling[name]:.1f}" for name in names]))
    if bench != "ema" and result.differences:
        columns.append(("differs by", [f"{result.differences[name]:.0e}" for name in names]))
    return _table(title, columns)


def _of_average(result: Result, names: list[str]) -> list[Column]:
    """What an average costs: the candidates with it less the same ones without."""
    timing, held = result.timing, result.held
    assert held is not None
    pairs = [(name, ema.without_average(name)) for name in names]
    more = [timing.difference(*pair).times(1000) for pair in pairs]
    minima = [three_digits(1000 * timing.difference_of_minimums(*pair)) for pair in pairs]
    return [
        *_spreads("average costs, ms", more, three_digits)[:2],
        ("difference of the minima", minima),
        ("MB of state on one shard", [three_digits(held[name] / 1e6) for name in names]),
        ("MB of average", [three_digits((held[one] - held[other]) / 1e6) for one, other in pairs]),
    ]


def _of_steps(results: Sequence[Result]) -> Table:
    by_hand = [1000 * result.timing.spread(HAND_WRITTEN).median for result in results]
    columns: list[Column] = [
        ("problem", [result.problem for result in results]),
        ("parameters", [f"{result.parameters:,}" for result in results]),
        ("shards", [f"{result.shards}" for result in results]),
        ("by hand, ms", [three_digits(each) for each in by_hand]),
    ]
    for name in (OURS_AUTO, OURS_SHARDED, OURS_REPLICATED):
        ratios = [result.timing.ratio(name, HAND_WRITTEN) for result in results]
        columns += _spreads(f"{name} ÷ by hand", ratios, _two_decimals)[:2]
        minima = [result.timing.ratio_of_minimums(name, HAND_WRITTEN) for result in results]
        columns.append(("ratio of the minima", [_two_decimals(each) for each in minima]))
    return _table("Time of a step, relative to one written by hand", columns)


def _of_differences(
    results: Sequence[Result], title: str, ours: str, bare: str, unit: float
) -> Table:
    """What ours costs beyond the other."""
    timings = [result.timing for result in results]
    columns: list[Column] = [("problem", [result.title() for result in results])]
    for name in (bare, ours):
        times = [timing.spread(name).times(unit) for timing in timings]
        columns += _spreads(name, times, _whole)[:1]
    more = [timing.difference(ours, bare).times(unit) for timing in timings]
    minima = [_whole(unit * timing.difference_of_minimums(ours, bare)) for timing in timings]
    columns += _spreads("difference", more, _whole)
    return _table(title, [*columns, ("difference of the minima", minima)])


def _ratios(heading: str, result: Result, pairs: list[tuple[str, str]]) -> list[Column]:
    ratios = [result.timing.ratio(*pair) for pair in pairs]
    minima = [_two_decimals(result.timing.ratio_of_minimums(*pair)) for pair in pairs]
    return [*_spreads(heading, ratios, _two_decimals), ("ratio of the minima", minima)]


def _spreads(heading: str, spreads: list[Spread], text: Callable[[float], str]) -> list[Column]:
    """The medians, the quartiles and the minima."""
    return [
        (heading, [text(each.median) for each in spreads]),
        ("quartiles", [f"{text(each.low)} to {text(each.high)}" for each in spreads]),
        ("minimum", [text(each.least) for each in spreads]),
    ]


def _table(title: str, columns: list[Column]) -> Table:
    rows = zip(*(cells for _, cells in columns), strict=True)
    return Table(title, [heading for heading, _ in columns], [list(row) for row in rows])


def _whole(number: float) -> str:
    return f"{number:.0f}"


def _two_decimals(number: float) -> str:
    return f"{number:.2f}"


def three_digits(number: float) -> str:
    """Format with three significant digits, or all before the point."""
    size = abs(number)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{number:,.{decimals}f}"
