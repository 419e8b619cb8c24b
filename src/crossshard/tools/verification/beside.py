"""Beside parameters: statistics that a step keeps and metrics that it returns, on N and on one."""

from collections.abc import Iterable, Mapping

import numpy as np

from crossshard._text import listed
from crossshard.tools.verification import kinds
from crossshard.tools.verification.arithmetic import norm
from crossshard.tools.verification.report import Fault
from crossshard.tools.verification.samples import Mean

_EACH_ITS_OWN = "each shard has its own: not reduced"


def are_of_rows(statistics: Iterable[Mean], updates: Iterable[Mean]) -> bool:
    """Whether any of these is a statistic of rows, such as one of batch norm, not of gradients."""
    of_size: dict[int, list[np.ndarray]] = {}
    for update in updates:
        of_size.setdefault(update.one[0].size, []).append(update.one[0])
    along = lambda x, y: abs(x @ y) > 0.9 * norm(x) * norm(y)
    ones = [mean.one[0] for mean in statistics]
    return any(x.size > 1 and not any(along(x, y) for y in of_size.get(x.size, [])) for x in ones)


def of_statistics(statistics: Mapping[str, Mean]) -> tuple[list[Fault], list[str]]:
    """What is wrong with statistics, by their names, and what should be noted."""
    found: dict[tuple[str, str], list[str]] = {}
    notes: dict[str, None] = {}
    for name, mean in statistics.items():
        kind, words = _told(mean)
        if words == _EACH_ITS_OWN and mean.is_stacked:
            words = (
                "each shard keeps statistics of its own: reduce them before you evaluate or save"
            )
            notes[words] = None
        elif kind:
            found.setdefault((kinds.STATISTICS, words), []).append(name)
        elif words:
            notes[f"{name} {words}"] = None
    return _faults(found, ""), list(notes)


def of_metrics(metrics: Mapping[str, Mean]) -> list[Fault]:
    """What is wrong with the scalars that the step returns besides its state, by their names."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, mean in metrics.items():
        kind, words = _told(mean)
        if kind and not mean.is_stacked and mean.one.size == 1:
            found.setdefault((kind, words), []).append(name)
    return _faults(found, "metric ")


def _faults(found: dict[tuple[str, str], list[str]], what: str) -> list[Fault]:
    return [
        Fault(kind, f"{what}{listed(names, 4)}: {words}", tuple(names))
        for (kind, words), names in found.items()
    ]


def _told(mean: Mean) -> tuple[str, str]:
    """The kind of what is wrong, and words; both empty if nothing is, no kind if it has no name."""
    many, (one,), own, chance = mean.many, mean.one, mean.own, mean.chance.max()
    of_own = mean.chance_of_own * chance

    def near(one: np.ndarray, other: np.ndarray, off: float, within: float = 1e-3) -> bool:
        scale = max(norm(one), norm(other))
        return norm(one - other) <= within * scale + off + mean.rounding

    if all(near(copy, one, chance) for copy in many):
        return "", ""
    if any(not near(copy, many[0], 0.0, 1e-5) for copy in many[1:]):
        return kinds.METRIC_ONE_SHARD, _EACH_ITS_OWN
    if own is None or near(many[0], own.mean(axis=0), of_own):
        return "", ""
    number = len(own)
    for shard, alone in enumerate(own):
        if near(many[0], alone, of_own, 1e-4):
            return kinds.METRIC_ONE_SHARD, f"it is shard {shard}'s own: not reduced"
    if near(many[0], own.sum(axis=0), number * of_own):
        return kinds.METRIC_SUMMED, f"{number:.3f} = N: summed over the shards, not averaged"
    if near(many[0], own.mean(axis=0) / number, of_own / number):
        return kinds.METRIC_AVERAGED, f"{1 / number:.3f} = 1/N: averaged twice"
    return "", "is neither that of all rows nor the mean of the shards'"
