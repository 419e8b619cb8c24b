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
from tests.quick import deep
from tests.step.common import assert_close, on_one_device

STEPS = 4
_rng = np.random.default_rng(11)
START = {
    "kernel": np.float32(_rng.normal(size=(64, 33)) / 8),
    "odd": np.float32(_rng.normal(size=(41, 29)) / 8),
    "bias": np.zeros(33, np.float32),
}
XS = np.float32(_rng.normal(size=(STEPS, 16, 64)) + np.linspace(-1, 1, 16)[:, None])
SGD, MOMENTUM, ADAMW = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adamw(0.05)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    decay = x.mean() * (params["odd"] ** 2).sum()
    return ((x @ params["kernel"] + params["bias"] - 1) ** 2).mean() + decay


def trained(opt: CrossShardOptimizer, mesh: Mesh, check_vma: bool) -> Any:
    specs = opt.state_specs(START, mesh.size, mesh.axis_names)
    shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    @jax.jit
    @functools.partial(shard_map, in_specs=(P(), specs, P(mesh.axis_names)), out_specs=(P(), specs))
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        gradients = crossshard.grad(loss_fn)(params, x)
        updates, state = opt.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params: Any = START
    state = jax.jit(shard_map(opt.init, in_specs=P(), out_specs=specs))(params)
    for x in XS:
        params, state = step(params, state, x)
    return params, state


@pytest.mark.parametrize(
    ("rule", "sizes", "check_vma"),
    [(SGD, (8,), True), (ADAMW, (2, 4), False), deep((MOMENTUM, (2, 4), True))],
)
def test_it_steps_as_one_device(rule: Any, sizes: tuple[int, ...], check_vma: bool):
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), tuple("xy"[: len(sizes)]))
    axes = mesh.axis_names if len(sizes) > 1 else None
    opt = CrossShardOptimizer(rule, axis_name=axes, weight_update="sharded")
    params, state = trained(opt, mesh, check_vma)
    expected, expected_state = on_one_device(loss_fn, rule, START, XS)
    assert_close(params, expected, 5e-6)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        if np.shape(other) == (64, 33):
            assert leaf.addressable_shards[0].data.shape == (8, 33)
            np.testing.assert_allclose(leaf, other, atol=5e-6)
        if np.shape(other) == (41, 29):
            np.testing.assert_allclose(np.ravel(leaf)[: 41 * 29], np.ravel(other), atol=5e-6)


def test_shards_that_vmap_simulates():
    opt = CrossShardOptimizer(MOMENTUM, weight_update="sharded")

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


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (optax.lamb(0.1), "scale_by_trust_ratio"),
        (
            optax.adafactor(0.1, min_dim_size_to_factor=8),
            "cannot be traced on slices of the parameters .scale_by_factored_rms",
        ),
        (optax.chain(optax.clip_by_global_norm(1.0), SGD), "clip_by_global_norm"),
        (optax.noisy_sgd(0.1, key=1), "random_bits.*add_noise"),
    ],
)
def test_another_rule_is_refused(rule: Any, said: str):
    opt = CrossShardOptimizer(rule, weight_update="sharded")
    with pytest.raises(WeightUpdateError, match=said):
        opt.state_specs(START, 8)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    init = jax.shard_map(opt.init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(WeightUpdateError, match=said):
        jax.jit(init)(START)


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
