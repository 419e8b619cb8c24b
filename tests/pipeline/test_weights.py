"""weight: a step in which nothing weighs, and equal weights.

That the mean is weighed, in groups and without, and that NaN of weight 0 does not count, hold the
combinations, by their factor of this name.
"""

import jax
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, make_train_step
from tests.step.common import assert_close, assert_same, sgd_step

N = 4
RNG = np.random.default_rng(0)
W = RNG.normal(size=(32, 40)).astype(np.float32)
X = RNG.normal(size=(2 * N, 32)).astype(np.float32)
ONES = np.ones(2 * N, np.float32)


def loss_fn(w, batch):
    return ((batch["x"] @ w) ** 2).mean()


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_a_step_in_which_nothing_weighs_changes_no_bit(weight_update: str):
    step = make_train_step(
        loss_fn,
        CrossShardOptimizer(optax.adamw(0.1), preprocess=optax.trace(0.5)),
        num_shards=N,
        weight_update=weight_update,
        weight=lambda batch: batch["n"].sum(),
        loss_over="shard",
        ema=0.9,
    )
    state, _ = step(step.init(W), {"x": X, "n": ONES})
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, {"x": np.full_like(X, np.nan), "n": 0 * ONES})
    assert_same(before, state)
    assert metrics["skipped"]
    assert float(metrics["weight"]) == 0
    state, metrics = step(state, {"x": X, "n": ONES})
    assert not metrics["skipped"]
    assert int(state.step) == 2


def test_equal_weights_are_none():
    ends = []
    for weight in (None, lambda batch: 7.0):
        step = sgd_step(loss_fn, 0.1, N, weight=weight)
        ends.append(step(step.init(W), {"x": X})[0].params)
    assert_close(*ends)
