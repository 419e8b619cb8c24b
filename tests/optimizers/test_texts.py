"""What errors of the stateful optimizer say, and where it says nothing."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentError, IncomingError, ShardContextWarning
from tests.stateful import adam, sgd

X = np.arange(8, dtype=np.float32)


def run(step: Any, *given: Any) -> Any:
    return crossshard.shard(num_shards=8)(step)(*given, X)


def test_the_same_pairs_twice():
    w, opt = nnx.Param(jnp.zeros(())), sgd(1.0)

    def step(w: Any, opt: Any, x: Any, incoming: str | None) -> None:
        pairs = opt.compute_gradients(lambda: w[...] * x[0], [w])
        opt.apply_gradients(pairs)
        opt.apply_gradients(pairs, incoming=incoming)

    with pytest.raises(IncomingError, match="has been applied already in this step"):
        run(lambda w, opt, x: step(w, opt, x, None), w, opt)
    np.testing.assert_array_equal(w[...], 0.0)
    run(lambda w, opt, x: step(w, opt, x, "scaled"), w, opt)
    np.testing.assert_array_equal(w[...], -7.0)


def test_a_state_of_groups_before_its_parameters():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    w, opt = nnx.Param(jnp.zeros(3)), adam(0.1, group_assignment=groups)
    step = lambda w, opt, x: opt.minimize(lambda: (w[...] * x[0]).sum(), var_list=[w])
    run(step, w, opt)
    other, fresh = (nnx.Param(jnp.zeros(3)), adam(0.1, group_assignment=groups))
    fresh.build([other])
    with pytest.raises(ArgumentError, match=r"Restore them first.*set_per_shard"):
        fresh.state = opt.state
    crossshard.nnx.set_per_shard(other, w[...])
    fresh.state = opt.state
    run(step, w, opt)
    run(step, other, fresh)
    np.testing.assert_array_equal(w[...], other[...])


@pytest.mark.parametrize("rule", [optax.sgd(0.5), optax.adam(0.5)])
def test_under_jit_arrays_are_global_and_nothing_is_missing(rule: Any):
    opt = CrossShardOptimizer(rule)
    params = jnp.ones(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardContextWarning)
        updates, _ = jax.jit(opt.update)(2 * params, opt.init(params), params)
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        opt.build(model)
        loss = nnx.jit(lambda m, o, x: o.minimize(lambda: (m(x) ** 2).mean(), var_list=m))
        loss(model, opt, jnp.ones((8, 3)))
    expected, _ = rule.update(2 * params, rule.init(params), params)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    # Outside of a trace, a step that forgot its shards is still told.
    with pytest.warns(ShardContextWarning, match="assuming 1 shard"):
        opt.update(params, opt.init(params), params)
