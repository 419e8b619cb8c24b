"""Beside parameters: statistics that a step keeps and metrics that it returns, on N and on one."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from crossshard._text import listed
from crossshard.tools.verification import kinds
from crossshard.tools.verification.arithmetic import apart, norm, unstacked
from crossshard.tools.verification.built_step import Run, Snapshot
from crossshard.tools.verification.report import Fault

_EACH_ITS_OWN = "each shard has its own: not reduced"


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of a step.

    Attributes:
      number: the number of shards.
      many: that of all shards.
      one: that of one device with all rows.
      own: those of one device with the rows of each shard; ``None`` if it does not take them.
    """

    number: int
    many: Run
    one: Run
    own: Sequence[Run] | None


def changed_when_idle(names: Sequence[str], run: Run) -> list[str]:
    """Which of these an idle step changes, of arrays of real numbers: statistics and the like."""
    found = []
    for name in names:
        before, after = run.start[name].values, run.idle.get(name)
        if after is not None and after.is_float and after.values.shape == before.shape:
            found += [name] if apart(before, after.values) else []
    return found


def of_statistics(names: Sequence[str], runs: Runs) -> tuple[list[Fault], list[str]]:
    """What is wrong with statistics of these names, and what should be noted."""
    found: dict[tuple[str, str], list[str]] = {}
    notes: dict[str, None] = {}
    for name in names:
        kind, words, is_stacked = _wrong(name, runs, lambda run: run.idle)
        if words == _EACH_ITS_OWN and is_stacked:
            words = (
                "each shard keeps statistics of its own: reduce them before you evaluate or save"
            )
            notes[words] = None
        elif kind:
            found.setdefault((kinds.STATISTICS, words), []).append(name)
        elif words:
            notes[f"{name} {words}"] = None
    return _faults(found, ""), list(notes)


def of_metrics(runs: Runs) -> list[Fault]:
    """What is wrong with the scalars that the step returns besides its state."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, metric in runs.one.metrics.items():
        kind, words, is_stacked = _wrong(name, runs, lambda run: run.metrics)
        if kind and not is_stacked and metric.values[0].size == 1:
            found.setdefault((kind, words), []).append(name)
    return _faults(found, "metric ")


def _faults(found: dict[tuple[str, str], list[str]], what: str) -> list[Fault]:
    return [
        Fault(kind, f"{what}{listed(names, 4)}: {words}", tuple(names))
        for (kind, words), names in found.items()
    ]


def _wrong(name: str, runs: Runs, of: Callable[[Run], Snapshot]) -> tuple[str, str, bool]:
    """The kind and the words of what is wrong with an array, if anything; whether it is stacked."""
    every = [of(run).get(name) for run in (runs.many, runs.one, *(runs.own or ()))]
    known = [each for each in every if each is not None]
    if len(known) < len(every):
        return "", "", False
    one, *own = (each.values[0].astype(np.float64) for each in known[1:])
    many = unstacked(known[0], one.shape, runs.number)
    if many is None:
        return "", "", False
    is_stacked = known[0].values.shape[1:] != one.shape
    return *_told(many, one, np.stack(own) if own else None), is_stacked


def _told(many: np.ndarray, one: np.ndarray, own: np.ndarray | None) -> tuple[str, str]:
    """The kind of what is wrong, and words; both empty if nothing is, no kind if it has no name."""
    if all(_near(copy, one) for copy in many):
        return "", ""
    if any(not _near(copy, many[0], 1e-5) for copy in many[1:]):
        return kinds.METRIC_ONE_SHARD, _EACH_ITS_OWN
    if own is None or _near(many[0], own.mean(axis=0)):
        return "", ""
    number = len(own)
    for shard, alone in enumerate(own):
        if _near(many[0], alone, 1e-4):
            return kinds.METRIC_ONE_SHARD, f"it is shard {shard}'s own: not reduced"
    if _near(many[0], own.sum(axis=0)):
        return kinds.METRIC_SUMMED, f"{number:.3f} = N: summed over the shards, not averaged"
    if _near(many[0], own.mean(axis=0) / number):
        return kinds.METRIC_AVERAGED, f"{1 / number:.3f} = 1/N: averaged twice"
    return "", "is neither that of all rows nor the mean of the shards'"


def _near(one: np.ndarray, other: np.ndarray, within: float = 1e-3) -> bool:
    scale = max(norm(one), norm(other))
    return norm(one - other) <= within * scale + 1e-7
