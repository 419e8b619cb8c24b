"""Every planted fault is named, in every way of running a step, and no right step is accused."""

from typing import Any

import jax
import pytest

import crossshard
from tests.verification.faults import FAULTS, RIGHT
from tests.verification.ways import WAYS, Plan, batch, factory


def spread(names: Any) -> list[Any]:
    """All names in all ways; each name in one way, others with `make soak`."""
    return [
        pytest.param(
            name,
            way,
            marks=() if number % len(WAYS) == place else pytest.mark.soak,
            id=f"{way}-{name}",
        )
        for number, name in enumerate(names)
        for place, way in enumerate(WAYS)
    ]


def run(plan: Plan, way: str, groups: Any = None) -> crossshard.Verification:
    key = jax.random.key(7) if plan.keyed else None
    return crossshard.verify(factory(way, plan), *batch(), num_shards=8, key=key, groups=groups)


@pytest.mark.parametrize(("name", "way"), spread(FAULTS))
def test_a_fault_is_named(name: str, way: str):
    planted = FAULTS[name]
    found = run(planted.plan, way, planted.groups)
    assert [fault.kind for fault in found.faults] == [planted.kind], found
    (fault,) = found.faults
    assert planted.words in str(found)
    assert len(fault.leaves) == planted.leaves
    assert not found.ok


@pytest.mark.parametrize(("name", "way"), spread(RIGHT))
def test_a_right_step_is_fine(name: str, way: str):
    found = run(RIGHT[name], way)
    assert found.ok, found
    assert all(leaf.verdict == "fine" for leaf in found.leaves)
    assert not found.notes
