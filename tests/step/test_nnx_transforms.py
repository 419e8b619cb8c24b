"""NNX's own transforms inside of a model: they hand its variables out anew, and write nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from crossshard import make_train_step
from crossshard.errors import VariableError
from tests.step.common import assert_close, train

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(jnp.tanh(self.linear(x)))


class Model(nnx.Module):
    def __init__(self, through: Callable[[Layer, jax.Array], jax.Array]):
        self.layer = Layer(nnx.Rngs(0))
        self.through = through

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.through(self.layer, x)


def plainly(layer: Layer, x: jax.Array) -> jax.Array:
    return layer(x)


def through_cond(layer: Layer, x: jax.Array) -> jax.Array:
    return nnx.cond(x.sum() > -1e9, plainly, lambda layer, x: layer(2 * x), layer, x)


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return (model(batch) ** 2).mean()


def trained(model: Any) -> Any:
    """The state of the layer after three steps, each shard with its own statistics."""
    step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=4, loss_over="shard")
    state = train(step, step.init(model), [X] * 3)
    return jax.device_get(nnx.to_pure_dict(nnx.state(step.model(state).layer)))


def test_a_transform_in_a_model_changes_nothing():
    want = trained(Model(plainly))
    for through in (nnx.remat(plainly), nnx.jit(plainly), through_cond):
        assert_close(trained(Model(through)), want, 1e-6, 1e-5)


def halving(layer: Layer, x: jax.Array) -> jax.Array:
    layer.linear.bias[...] = layer.linear.bias[...] * 0.5
    return layer(x)


def swapping(layer: Layer, x: jax.Array) -> jax.Array:
    norm: Any = layer.norm
    norm.bias[...], norm.scale[...] = norm.scale[...], norm.bias[...]
    return layer(x)


@pytest.mark.parametrize("through", [nnx.remat(halving), nnx.jit(halving), nnx.jit(swapping)])
def test_what_is_written_inside_of_a_transform_is_still_refused(through: Any):
    with pytest.raises(VariableError, match=r"wrote to an nnx\.Param"):
        trained(Model(through))
