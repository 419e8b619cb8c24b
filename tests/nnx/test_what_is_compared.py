"""Processes compare the variables that no step has written, in the call that is given them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from crossshard import CrossShardOptimizer, Mean, shard
from crossshard.distributed.judge import Report
from crossshard.distributed.watch import PROGRESS
from crossshard.nnx import program

ROWS = np.linspace(0, 3, 16, dtype=np.float32)


def step_on(told: list[Any], monkeypatch: pytest.MonkeyPatch, loss: Any) -> Any:
    """A step that tells another process, which is not there, what it compares with it."""
    monkeypatch.setattr(program, "processes_of", lambda _: (0, 1))
    monkeypatch.setattr(program, "are_of_all_processes", lambda _: True)
    monkeypatch.setattr(program, "check_agreement", lambda *given: told.append(given[1]()))
    return shard(num_shards=2)(
        lambda w, opt, x: opt.minimize(lambda: loss(w[...], x), var_list=[w])
    )


def test_a_step_compares_what_was_written_since_the_last(monkeypatch: pytest.MonkeyPatch):
    told: list[Any] = []
    step = step_on(told, monkeypatch, lambda w, x: jnp.mean((w - x) ** 2))
    w = nnx.Param(jnp.float32(0))
    opt = CrossShardOptimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.25))
    step(w, opt, ROWS)
    assert len(told.pop()) == len(nnx.to_flat_state(nnx.state(opt))) + 1
    step(w, opt, ROWS)
    assert not told
    sums = []
    for rate in (0.1, 0.2, 0.2):
        opt.state.inner_state.hyperparams["learning_rate"][...] = rate
        step(w, opt, ROWS)
        ((name, found),) = told.pop().items()
        assert name.startswith("OptState float32[]")
        sums.append(found)
    assert sums[0] != sums[1] == sums[2]
    # Another step that is given the same variables knows what this one has written.
    again = shard(num_shards=2)(lambda w, x: x * w[...])
    again(w, ROWS)
    assert not told
    w[...] = jnp.float32(3)
    again(w, ROWS)
    assert [next(iter(each)) for each in told] == ["Param float32[], variable 0 of the step,"]


@pytest.mark.parametrize("counts", [False, True])
def test_any_number_of_rows_of_a_mean_is_the_same(counts: bool, monkeypatch: pytest.MonkeyPatch):
    mean = lambda w, x: Mean(((w - x) ** 2).sum(), x.size)
    # What it tells others is that of this test alone.
    monkeypatch.setattr(PROGRESS, "now", Report(0, 1, "step 1"))
    step = step_on([], monkeypatch, mean if counts else lambda w, x: jnp.mean((w - x) ** 2))
    step(nnx.Param(jnp.float32(0)), CrossShardOptimizer(optax.sgd(0.25)), ROWS)
    rows = PROGRESS.now.rows.rpartition(" and ")[2]
    assert rows == ("float32[any]" if counts else "float32[8]")
