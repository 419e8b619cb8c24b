"""States: what a step keeps besides parameters, and its metrics, on N shards and on one."""

from collections.abc import Sequence

import numpy as np

from crossshard.tools.verification.arithmetic import apart, unstacked
from crossshard.tools.verification.built_step import Taken
from crossshard.tools.verification.evidence import StateEvidence
from crossshard.tools.verification.snapshot import Copies


def others(
    number: int,
    names: Sequence[str],
    together: Taken,
    groups: Sequence[list[Taken]],
    own: Sequence[list[Taken]] | None,
) -> tuple[StateEvidence, ...]:
    """Arrays that an idle step changes.

    Args:
      number: that of the shards.
      names: those of arrays that are no parameters.
      together: a step of all shards.
      groups: the steps of one device with the rows of each group.
      own: those with the rows of each shard, if it takes them.
    """
    found = []
    for name in names:
        before, after = groups[0][0].before[name], groups[0][0].after.get(name)
        if after is None or name not in together.after or not after.is_float:
            continue
        if after.values.shape == before.values.shape and apart(after.values, before.values):
            of = [each[0].after[name] for each in groups]
            each = None if own is None else [run[0].after[name] for run in own]
            found += _state(number, name, together.after[name], of, each)
    return tuple(found)


def metrics(
    number: int,
    together: Taken,
    groups: Sequence[list[Taken]],
    own: Sequence[list[Taken]] | None,
) -> tuple[StateEvidence, ...]:
    """What the step returns besides its state; the arguments are those of ``others``."""
    found = []
    for name, many in together.metrics.items():
        of = [each[0].metrics.get(name) for each in groups]
        each = None if own is None else [run[0].metrics.get(name) for run in own]
        known = [x for x in of if x is not None]
        alone = None if each is None else [x for x in each if x is not None]
        if len(known) == len(of) and known[0].values[0].size == 1:
            found += _state(number, name, many, known, alone)
    return tuple(found)


def _state(
    number: int, name: str, many: Copies, one: list[Copies], own: list[Copies] | None
) -> list[StateEvidence]:
    shape = one[0].values.shape[1:]
    values, stacked = unstacked(many, shape, number)
    if values is None:
        return []
    flat = lambda each: np.stack([x.values[0].astype(np.float64).ravel() for x in each])
    return [
        StateEvidence(
            name,
            values.reshape(len(values), -1),
            flat(one),
            None if own is None or len(own) < number else flat(own),
            stacked,
        )
    ]
