"""A sharded weight update inside the caller's own shard_map, by the Optax idiom."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentError, WeightUpdateError
from tests.step.common import assert_close, on_one_device

STEPS = 4
_rng = np.random.default_rng(11)
START = {
    "kernel": np.float32(_rng.normal(size=(64, 33)) / 8),
    "odd": np.float32(_rng.normal(size=(41, 29)) / 8),
    "bias": np.zeros(33, np.float32),
}
XS = np.float32(_rng.normal(size=(STEPS, 16, 64)) + np.linspace(-1, 1, 16)[:, None])
SGD, MOMENTUM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    decay = x.mean() * (params["odd"] ** 2).sum()
    return ((x @ params["kernel"] + params["bias"] - 1) ** 2).mean() + decay


def test_two_axes_step_as_one_device_and_each_shard_has_a_slice():
    """What tests/pipeline/ways_in.py compares with NumPy has one axis, and no odd array."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    opt = CrossShardOptimizer(MOMENTUM, axis_name=("x", "y"), weight_update="sharded")
    specs = opt.state_specs(START, mesh.size, mesh.axis_names)
    shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    @jax.jit
    @functools.partial(shard_map, in_specs=(P(), specs, P(("x", "y"))), out_specs=(P(), specs))
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        updates, state = opt.update(crossshard.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params: Any = START
    state = jax.jit(shard_map(opt.init, in_specs=P(), out_specs=specs))(params)
    for x in XS:
        params, state = step(params, state, x)
    expected, expected_state = on_one_device(loss_fn, MOMENTUM, START, XS)
    assert_close(params, expected, 5e-6)
    found, wanted = (each[0].trace for each in (state.inner_state, expected_state))
    assert found["kernel"].addressable_shards[0].data.shape == (8, 33)
    np.testing.assert_allclose(found["kernel"], wanted["kernel"], atol=5e-6)
    np.testing.assert_allclose(
        np.ravel(found["odd"])[: 41 * 29], np.ravel(wanted["odd"]), atol=5e-6
    )


@pytest.mark.deep
def test_shards_that_vmap_simulates():
    opt = CrossShardOptimizer(MOMENTUM, weight_update="sharded")

    @jax.jit
    @functools.partial(jax.vmap, axis_name="x", in_axes=(None, 1))
    def train(params: Any, xs: jax.Array) -> Any:
        state = opt.init(params)
        for x in xs:
            updates, state = opt.update(jax.grad(loss_fn)(params, x), state, params)
            params = optax.apply_updates(params, updates)
        return params

    params = train(START, XS.reshape(STEPS, 8, 2, 64))
    expected, _ = on_one_device(loss_fn, MOMENTUM, START, XS)
    for shard in range(8):
        assert_close(jax.tree.map(lambda p, s=shard: p[s], params), expected, 5e-6)


def test_the_stateful_idiom_refuses_parts_and_auto_is_for_make_train_step():
    opt = CrossShardOptimizer(MOMENTUM, weight_update="sharded")
    w = nnx.Param(jnp.ones((64, 64)))
    with crossshard.shard_context(1):
        for call in (
            lambda: opt.minimize(lambda: w[...].sum(), var_list=[w]),
            lambda: opt.build([w]),
        ):
            with pytest.raises(WeightUpdateError, match="Optax idiom"):
                call()
    with pytest.raises(ArgumentError, match="make_train_step"):
        CrossShardOptimizer(SGD, weight_update="auto")
    step = crossshard.make_train_step(lambda p, b: p.sum() * b.mean(), opt, num_shards=8)
    step.abstract_init(np.zeros((64, 64), np.float32))
    assert "sharded update" in step.describe()
