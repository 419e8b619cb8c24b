"""A step that is taken twice: the same bits if nothing is at fault, and names if something is."""

from typing import Any

import jax
import numpy as np
import pytest

from crossshard.errors import ArgumentError
from tests.step.faults import Snapshot, names_of, one_bit
from tests.step.test_divergence import BATCH, MODEL_AXIS, build


def test_a_step_without_faults_has_the_same_bits_twice():
    step, state = build("stages")
    before = Snapshot.of(state)
    assert step.replay(state, BATCH) == {}
    assert Snapshot.of(state).has_same_bits(before)
    # It is a state of this step still, and the step has not been counted.
    after, _ = step(state, BATCH)
    assert int(after.step) == 1


def with_wrong_arithmetic(step: Any, name: str, device: int) -> None:
    """Makes a device compute one bit of one array wrongly, the second time that the step runs."""
    run, runs = step._program, []

    def wrong(state: Any, batch: Any) -> Any:
        after, metrics = run(state, batch)
        runs.append(name)
        if len(runs) != 2:
            return after, metrics
        fault = lambda x: one_bit(x, np.random.default_rng(1))
        leaf = names_of(after).index(name)
        broken = Snapshot.of(after).restored(leaf, jax.devices()[device], fault)
        return broken, metrics

    step._program = wrong


@pytest.mark.parametrize(
    ("case", "name", "device", "shard"),
    [
        # A slice that no other shard has.
        ("adamw sharded", "opt_state.inner_state[0].mu['kernel']", 3, 3),
        (MODEL_AXIS, "opt_state.inner_state[0].nu['kernel']", 5, 2),
    ],
)
def test_what_differs_is_named_with_its_shard(case: str, name: str, device: int, shard: int):
    step, state = build(case)
    with_wrong_arithmetic(step, name, device)
    assert step.replay(state, BATCH) == {name: (shard,)}
    assert step.replay(state, BATCH) == {}


def test_it_is_refused_where_jax_traces():
    step, state = build("sgd")
    with pytest.raises(ArgumentError, match="outside of"):
        jax.jit(lambda state: step.replay(state, BATCH) and 1.0)(state)
