"""What errors of the stateful optimizer say, and where it says nothing."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer

X = np.arange(8, dtype=np.float32)


def run(step: Any) -> Any:
    return crossshard.shard(num_shards=8)(step)(X)


def test_which_word_is_tensorflows():
    w, opt = nnx.Param(jnp.zeros(())), CrossShardOptimizer(optax.sgd(1.0))
    with pytest.raises(crossshard.IncomingError, match=r"'scaled'.*which is what TensorFlow's"):
        run(lambda x: opt.apply_gradients([(x[0], w)]))
    run(lambda x: opt.apply_gradients([(x[0], w)], incoming="scaled"))
    np.testing.assert_array_equal(w[...], -28.0)


def test_what_tensorflow_does_with_a_vector():
    w, opt = nnx.Param(jnp.zeros(())), CrossShardOptimizer(optax.sgd(1.0))
    with pytest.raises(crossshard.ArgumentError, match=r"jnp\.mean.*jnp\.sum.*TensorFlow"):
        run(lambda x: opt.minimize(lambda: w[...] * jnp.stack([x[0], x[0]]), var_list=[w]))


def test_the_same_pairs_twice():
    w, opt = nnx.Param(jnp.zeros(())), CrossShardOptimizer(optax.sgd(1.0))

    def step(x: Any, incoming: str | None) -> None:
        pairs = opt.compute_gradients(lambda: w[...] * x[0], [w])
        opt.apply_gradients(pairs)
        opt.apply_gradients(pairs, incoming=incoming)

    with pytest.raises(crossshard.IncomingError, match="has been applied already in this step"):
        run(lambda x: step(x, None))
    np.testing.assert_array_equal(w[...], 0.0)
    run(lambda x: step(x, "scaled"))
    np.testing.assert_array_equal(w[...], -7.0)


def test_a_state_of_groups_before_its_parameters():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    w, opt = nnx.Param(jnp.zeros(3)), CrossShardOptimizer(optax.adam(0.1), group_assignment=groups)
    run(lambda x: opt.minimize(lambda: (w[...] * x[0]).sum(), var_list=[w]))
    other, fresh = (
        nnx.Param(jnp.zeros(3)),
        CrossShardOptimizer(optax.adam(0.1), group_assignment=groups),
    )
    fresh.build([other])
    with pytest.raises(crossshard.ArgumentError, match=r"Restore them first.*set_per_shard"):
        fresh.state = opt.state
    crossshard.set_per_shard(other, w[...])
    fresh.state = opt.state
    run(lambda x: opt.minimize(lambda: (w[...] * x[0]).sum(), var_list=[w]))
    run(lambda x: fresh.minimize(lambda: (other[...] * x[0]).sum(), var_list=[other]))
    np.testing.assert_array_equal(w[...], other[...])


# A sharded weight update whose state is not in parts.


def test_the_optimizer_of_nnx_with_a_sharded_weight_update_in_a_runner():
    model = nnx.Linear(512, 64, rngs=nnx.Rngs(0))
    opt = CrossShardOptimizer(optax.adam(0.1), weight_update="sharded")
    with pytest.warns(crossshard.ShardContextWarning):
        optimizer = nnx.Optimizer(model, opt, wrt=nnx.Param)

    @crossshard.shard(num_shards=8)
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))

    with pytest.raises(crossshard.ArgumentError, match=r"\(64, 64\)\].*has .*\(512, 64\)\].*make"):
        step(model, optimizer, np.ones((8, 512), np.float32))


def test_a_state_made_outside_of_the_shards():
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    opt = CrossShardOptimizer(optax.adam(0.1), weight_update="sharded")
    params = {"w": jnp.ones((512, 64))}
    with pytest.warns(crossshard.ShardContextWarning):
        state = opt.init(params)
    update = lambda params, state: opt.update(params, state, params, incoming="local")
    step = jax.shard_map(
        update, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()), check_vma=False
    )
    with pytest.raises(crossshard.ArgumentError, match=r"\(64, 64\)\].*has .*\(512, 64\)\].*spec"):
        step(params, state)


# Where there is nothing to warn of.


@pytest.mark.parametrize("rule", [optax.sgd(0.5), optax.adam(0.5)])
def test_under_jit_arrays_are_global_and_nothing_is_missing(rule: Any):
    opt = CrossShardOptimizer(rule)
    params = jnp.ones(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", crossshard.ShardContextWarning)
        updates, _ = jax.jit(opt.update)(2 * params, opt.init(params), params)
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        opt.build(model)
        loss = nnx.jit(lambda m, o, x: o.minimize(lambda: (m(x) ** 2).mean(), var_list=m))
        loss(model, opt, jnp.ones((8, 3)))
    expected, _ = rule.update(2 * params, rule.init(params), params)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    # Outside of a trace, a step that forgot its shards is still told.
    with pytest.warns(crossshard.ShardContextWarning, match="assuming 1 shard"):
        opt.update(params, opt.init(params), params)
