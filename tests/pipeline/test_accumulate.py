"""accumulate_steps: what calls in between leave, what is sent, keys and statistics.

That k microbatches are one step, weighted or not, hold the combinations, by their factor of this
name.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.quick import deep
from tests.step.common import assert_same, sgd_step, shard_map_of

N, K = 4, 3
RNG = np.random.default_rng(0)
W = RNG.normal(size=3).astype(np.float32)
# float32[microbatches, shards, rows, …]
X = RNG.normal(size=(K, N, 2, 3)).astype(np.float32)


def loss_fn(w: Any, x: Any) -> jax.Array:
    return ((x @ w - 1) ** 2).mean()


def test_calls_in_between_count_and_change_nothing_else():
    opt = CrossShardOptimizer(optax.sgd(0.1, momentum=0.9), accumulate_steps=K)
    init, step = shard_map_of(opt, loss_fn, W, N, True, None)
    w, state = init(W)
    for call, x in enumerate([*X, *X], 1):
        before = w, state.inner_state
        w, state = step((w, state), x)
        assert int(state.accumulate.count) == call % K
        if call % K:
            assert_same((w, state.inner_state), before)
        else:
            assert not any(np.any(x) for x in jax.tree.leaves(state.accumulate))


def test_only_the_last_call_sends_read_from_the_program():
    def text(**options: Any) -> str:
        opt = CrossShardOptimizer(optax.sgd(0.1), **options)
        init, step = shard_map_of(opt, loss_fn, W, N, False, None)
        return step.lower(init(W), X[0]).compile().as_text()

    always, sometimes = text(), text(accumulate_steps=K)
    reductions = lambda text: re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
    assert (len(reductions(always)), len(reductions(sometimes))) == (1, 2)
    entry = sometimes[sometimes.index("\nENTRY") :]
    # Each call asks how many calls most shards have counted.
    assert [kind.split("{")[0] for kind in reductions(entry)] == [f"s32[{N}]"]
    assert " conditional(" in entry


@pytest.mark.parametrize("weight_update", [deep("replicated"), "sharded"])
def test_a_step_sends_as_much_as_without_microbatches(weight_update: str):
    params, x = {"w": np.zeros((64, 32), np.float32)}, np.ones((N * 8, 64), np.float32)
    loss = lambda p, x: ((x @ p["w"]) ** 2).mean()

    def collectives(**options: Any) -> Any:
        step = sgd_step(loss, 0.1, N, weight_update=weight_update, **options)
        report = crossshard.inspect(step.lower(step.init(params), x))
        return sorted((each.kind, each.bytes_sent, each.times) for each in report.collectives)

    assert collectives(accumulate_steps=4) == collectives()


def test_random_keys_and_statistics_are_those_of_small_steps():
    class Normed(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
            self.w = nnx.Param(jnp.asarray(W))

    def loss(model: Any, x: Any, rng: Any) -> Any:
        return ((model.norm(x) @ model.w[...]) ** 2).mean(), jax.random.uniform(rng)

    # A learning rate of 0, so that small steps and microbatches see the same parameters.
    stepped = lambda **options: make_train_step(
        loss, optax.sgd(0.0), num_shards=N, has_aux=True, loss_over="shard", **options
    )
    whole, small = stepped(accumulate_steps=K), stepped()
    at_once, metrics = whole(whole.init(Normed()), np.moveaxis(X, 0, 1).reshape(-1, 3))
    state, draws = small.init(Normed()), []
    for x in X:
        state, each = small(state, x.reshape(-1, 3))
        draws.append(each["aux"])
    np.testing.assert_array_equal(metrics["aux"], np.stack(draws, 1))
    assert len(np.unique(draws)) == N * K
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
    jax.tree.map(close, at_once.model_state, state.model_state)
