"""Gradients of 16 bits: all three ways average them in 32, as numpy does in 64."""

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
from tests.quick import deep

SHARDS = 8
# An eighth of these is nothing in float16, whose smallest number is 2**-24.
ROWS = np.random.default_rng(0).integers(-7, 8, size=(SHARDS, 1024)) * 2.0**-22
DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
OPTIMIZERS = {"sgd": lambda: optax.sgd(1.0), "adam": lambda: optax.adam(0.5, eps=1e-7)}


def loss(w: Any, x: Any) -> Any:
    return (w * x.mean(0)).sum()


def in_shard_map(opt: Any, w: Any, x: Any) -> Any:
    mesh = jax.make_mesh((SHARDS,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(w: Any, x: Any) -> Any:
        updates, _ = opt.update(crossshard.grad(loss)(w, x), opt.init(w), w)
        return optax.apply_updates(w, updates)

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("shards")), out_specs=P()))(w, x)


def in_variables(opt: Any, w: Any, x: Any) -> Any:
    variable = nnx.Param(w)

    @crossshard.shard(num_shards=SHARDS)
    def step(variable: Any, opt: Any, x: Any) -> None:
        opt.minimize(lambda: loss(variable[...], x), var_list=[variable])

    step(variable, opt, x)
    return variable[...]


def in_a_whole_step(opt: Any, w: Any, x: Any) -> Any:
    step = crossshard.make_train_step(loss, opt, num_shards=SHARDS)
    state, _ = step(step.init(w), x)
    return state.params


WAYS = {"shard_map": in_shard_map, "variables": in_variables, "whole step": in_a_whole_step}


def in_numpy(name: str, dtype: Any) -> np.ndarray:
    gradient = ROWS.astype(dtype).astype(np.float64).mean(0)
    # As it is handed to the optimizer, in the parameter's own dtype.
    gradient = np.asarray(jnp.asarray(gradient, dtype), np.float64)
    if name == "sgd":
        return -gradient
    return -0.5 * gradient / (np.abs(gradient) + 1e-7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("sgd", "float16"), ("adam", "bfloat16")),
        *(deep(("sgd", "bfloat16")), deep(("adam", "float16"))),
    ],
)
def test_a_small_gradient_is_not_lost(way: str, name: str, dtype: str):
    kind = DTYPES[dtype]
    # Adam's own moments are 16 bits wide, whose squares are nothing here.
    rule = OPTIMIZERS[name]() if name == "sgd" else in_32_bits(OPTIMIZERS[name]())
    w = jnp.zeros(ROWS.shape[1], kind)
    got = np.asarray(WAYS[way](CrossShardOptimizer(rule), w, jnp.asarray(ROWS, kind)), np.float64)
    expected = in_numpy(name, kind)
    assert (expected != 0).mean() > 0.8
    bits = jnp.finfo(kind).nmant
    np.testing.assert_allclose(got, expected, rtol=2.0**-bits, atol=2.0**-25)


def in_32_bits(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that computes in 32 bits on what has 16."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        wider, state = optimizer.update(wide(updates), state, wide(params))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), wider, updates), state

    return optax.GradientTransformation(lambda params: optimizer.init(wide(params)), update)
