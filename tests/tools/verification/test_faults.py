"""Every planted fault is named, in every way of running a step, and no right step is accused."""

from typing import Any

import jax
import pytest

import crossshard
from tests.tools.verification.faults import FAULTS, RIGHT
from tests.tools.verification.ways import WAYS, Plan, batch, factory, skip_all_but


def spread(names: Any) -> list[Any]:
    """All names in all ways, others than the first of each name with `make soak`, in their order.

    Of those that come first each third is quick, which is one or more in every way.
    """
    pairs = [(name, way) for place in range(len(WAYS)) for name, way in _one_way_each(names, place)]
    in_suite = len(names)
    return [
        pytest.param(
            *pair,
            max(0, order - in_suite + 1),
            marks=pytest.mark.soak if order >= in_suite else pytest.mark.deep if order % 3 else (),
            id=f"{pair[1]}-{pair[0]}",
        )
        for order, pair in enumerate(pairs)
    ]


def _one_way_each(names: Any, place: int) -> list[tuple[str, str]]:
    ways = list(WAYS)
    return [(name, ways[(number + place) % len(ways)]) for number, name in enumerate(names)]


def run(plan: Plan, way: str, groups: Any = None) -> crossshard.tools.Verification:
    key = jax.random.key(7) if plan.keyed else None
    return crossshard.verify(factory(way, plan), *batch(), num_shards=8, key=key, groups=groups)


@pytest.mark.parametrize(("name", "way", "order"), spread(FAULTS))
def test_a_fault_is_named(name: str, way: str, order: int, soak_steps: int):
    skip_all_but(soak_steps, order)
    planted = FAULTS[name]
    found = run(planted.plan, way, planted.groups)
    assert [fault.kind for fault in found.faults] == [planted.kind], found
    (fault,) = found.faults
    assert planted.words in str(found)
    assert fault.factor == planted.factor
    assert len(fault.leaves) == planted.leaves
    assert not found.ok


def test_stacked_statistics_of_one_shard_are_not_taken_for_each_shards_own():
    (fault,) = run(FAULTS["statistics of shard 0"].plan, "pmap").faults
    assert fault.kind == "statistics"


@pytest.mark.parametrize(("name", "way", "order"), spread(RIGHT))
def test_a_right_step_is_fine(name: str, way: str, order: int, soak_steps: int):
    skip_all_but(soak_steps, order)
    found = run(RIGHT[name], way)
    assert found.ok, found
    assert all(leaf.verdict == "fine" for leaf in found.leaves)
    # What noise hides is said.
    assert [note[:33] for note in found.notes] == ["the step draws other random numbe"] * (
        RIGHT[name].keyed
    )
