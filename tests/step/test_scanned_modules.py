"""Stacked layers of NNX, Equinox, Linen and Haiku: summed in their loops, gathered in them."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from tests.quick import deep
from tests.step.common import assert_close, on_one_device, train
from tests.step.layered import BATCHES, LAYERS, WIDTH, step_of

SGD = optax.sgd(0.05)


def in_loop(step: Any, model: Any) -> set[str]:
    """The kinds of collectives that run once for each layer and move one of its matrices."""
    report = crossshard.inspect(step.lower(step.abstract_init(model), BATCHES[0]))
    moves = lambda each: each.bytes_sent >= LAYERS * WIDTH * WIDTH
    return {each.kind for each in report.collectives if each.times == LAYERS and moves(each)}


def of_module(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


# NNX.


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + 0.5 * jnp.tanh(self.linear(h))


class Stack(nnx.Module):
    """Layers that are made by vmap and run by scan."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        make = nnx.vmap(Layer, in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.float32(0))

    def __call__(self, h: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Layer, h: jax.Array) -> jax.Array:
            return nnx.remat(lambda layer, h: layer(h))(layer, h)

        self.seen[...] = 0.5 * self.seen[...] + 0.5 * h.mean()
        return self.out(run(self.layers, h))[:, 0]


def test_nnx_layers():
    step = step_of("parts", of_module, SGD)
    state = train(step, step.init(Stack()), BATCHES)
    model = Stack()
    plain = nnx.Optimizer(model, SGD, wrt=nnx.Param)
    gradient = nnx.jit(nnx.grad(of_module))
    for batch in BATCHES:
        plain.update(model, gradient(model, batch))
    got, want = (nnx.to_pure_dict(nnx.state(each)) for each in (step.model(state), model))
    assert_close(got, want)
    assert in_loop(step, Stack()) == {"reduce-scatter", "all-gather"}


# Equinox.


class Net(eqx.Module):
    layers: eqx.nn.Linear
    out: eqx.nn.Linear
    steps: jax.Array

    def __init__(self) -> None:
        key = jax.random.key(0)
        make = lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.layers = eqx.filter_vmap(make)(jax.random.split(key, LAYERS))
        self.out = eqx.nn.Linear(WIDTH, "scalar", key=key)
        self.steps = jnp.arange(4)

    def __call__(self, x: Any) -> Any:
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def turn(h: Any, arrays: Any) -> Any:
            run = eqx.filter_checkpoint(lambda layer, h: h + 0.5 * jnp.tanh(jax.vmap(layer)(h)))
            return run(eqx.combine(arrays, static), h), None

        h, _ = jax.lax.scan(turn, x, arrays)
        return jax.vmap(self.out)(h) + 0.0 * self.steps[0]


@pytest.mark.deep
def test_equinox_layers():
    model = Net()
    step = step_of("parts", of_module, SGD)
    state = train(step, step.init(model), BATCHES)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda arrays, batch: of_module(eqx.combine(arrays, static), batch)
    want, _ = on_one_device(loss, SGD, arrays, BATCHES)
    got = step.model(state)
    assert_close(jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array)), jax.tree.leaves(want))
    np.testing.assert_array_equal(got.steps, np.arange(4))
    assert in_loop(step, model) == {"reduce-scatter", "all-gather"}


# Linen and Haiku.


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, h: Any, _: Any) -> Any:
        return h + 0.5 * jnp.tanh(linen.Dense(WIDTH)(h)), None


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        run = linen.scan(linen.remat(LinenLayer), length=LAYERS, **options)()
        return linen.Dense(1)(run(x, None)[0])[:, 0]


def _haiku(x: Any) -> Any:
    layer = hk.remat(lambda h: h + 0.5 * jnp.tanh(hk.Linear(WIDTH)(h)))
    return hk.Linear(1)(hk.experimental.layer_stack(LAYERS)(layer)(x))[:, 0]


@pytest.mark.parametrize(
    "module",
    [LinenStack(), deep(hk.without_apply_rng(hk.transform(_haiku)))],
    ids=["linen", "haiku"],
)
def test_functional_layers(module: Any):
    params = module.init(jax.random.key(0), jnp.zeros((1, WIDTH)))
    loss = lambda params, batch: of_module(functools.partial(module.apply, params), batch)
    step = step_of("parts", loss, SGD)
    state = train(step, step.init(params), BATCHES)
    want, _ = on_one_device(loss, SGD, params, BATCHES)
    assert_close(state.params, want)
    assert in_loop(step, params) == {"reduce-scatter", "all-gather"}
