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
from crossshard import make_train_step
from tests.quick import deep
from tests.step.common import assert_close, on_one_device, train
from tests.step.layered import BATCHES, LAYERS, MODES, SHARDS, WIDTH

RATE = 0.05
SGD = optax.sgd(RATE)


def in_loop(step: Any, model: Any, batch: Any = BATCHES[0]) -> set[str]:
    """The kinds of collectives that run once for each layer and move one of its matrices."""
    report = crossshard.inspect(step.lower(step.abstract_init(model), batch))
    moves = lambda each: each.bytes_sent >= LAYERS * WIDTH * WIDTH
    return {each.kind for each in report.collectives if each.times == LAYERS and moves(each)}


EXPECTED = {
    "replicated": {"all-reduce"},
    "sharded": {"reduce-scatter"},
    "parts": {"reduce-scatter", "all-gather"},
}


def rows(batch: Any) -> Any:
    return batch["x"], batch["y"]


# NNX.


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + 0.5 * jnp.tanh(self.linear(h))


class Stack(nnx.Module):
    """Layers that are made by vmap and run by scan."""

    def __init__(self, rngs: nnx.Rngs, remat: bool, statistics: bool):
        split = nnx.split_rngs(splits=LAYERS)
        make = nnx.vmap(Layer, in_axes=0, out_axes=0)
        self.layers = split(make)(rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.float32(0)) if statistics else None
        self.remat = remat

    def __call__(self, h: jax.Array) -> jax.Array:
        call = lambda layer, h: layer(h)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Layer, h: jax.Array) -> jax.Array:
            return (nnx.remat(call) if self.remat else call)(layer, h)

        if self.seen is not None:
            self.seen[...] = 0.5 * self.seen[...] + 0.5 * h.mean()
        return self.out(run(self.layers, h))[:, 0]


def of_module(model: Any, batch: Any) -> Any:
    x, y = rows(batch)
    return ((model(x) - y) ** 2).mean()


@pytest.mark.parametrize(
    ("remat", "mode"), [(True, "replicated"), (True, "parts"), deep((False, "sharded"))]
)
def test_nnx_layers(remat: bool, mode: str):
    make = lambda: Stack(nnx.Rngs(0), remat, statistics=True)
    step = make_train_step(of_module, SGD, num_shards=SHARDS, **MODES[mode])
    state = train(step, step.init(make()), BATCHES)

    model = make()
    plain = nnx.Optimizer(model, SGD, wrt=nnx.Param)
    for batch in BATCHES:
        plain.update(model, nnx.grad(of_module)(model, batch))
    got, want = (nnx.to_pure_dict(nnx.state(each)) for each in (step.model(state), model))
    assert_close(got, want)
    assert in_loop(step, make()) == EXPECTED[mode]


def test_nnx_layers_that_only_some_train():
    wrt = nnx.All(nnx.Param, nnx.PathContains("layers"))
    step = make_train_step(of_module, SGD, num_shards=SHARDS, wrt=wrt, **MODES["parts"])
    model = Stack(nnx.Rngs(0), False, False)
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    state = train(step, step.init(model), BATCHES)
    after = nnx.to_pure_dict(nnx.state(step.model(state)))
    np.testing.assert_array_equal(after["out"]["kernel"], before["out"]["kernel"])
    kernels = [each["layers"]["linear"]["kernel"] for each in (after, before)]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3


# Equinox.


class Block(eqx.Module):
    linear: eqx.nn.Linear
    name: str = eqx.field(static=True)

    def __call__(self, h: Any) -> Any:
        return h + 0.5 * jnp.tanh(self.linear(h))


class Net(eqx.Module):
    layers: Block
    out: eqx.nn.Linear
    steps: jax.Array
    wrap: Any = eqx.field(static=True)

    def __init__(self, key: Any, wrap: Any):
        make = lambda key: Block(eqx.nn.Linear(WIDTH, WIDTH, key=key), "block")
        self.layers = eqx.filter_vmap(make)(jax.random.split(key, LAYERS))
        self.out = eqx.nn.Linear(WIDTH, "scalar", key=key)
        self.steps = jnp.arange(4)
        self.wrap = wrap

    def __call__(self, x: Any) -> Any:
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def turn(h: Any, arrays: Any) -> Any:
            layer = eqx.combine(arrays, static)
            return self.wrap(lambda layer, h: jax.vmap(layer)(h))(layer, h), None

        h, _ = jax.lax.scan(turn, x, arrays)
        return jax.vmap(self.out)(h) + 0.0 * self.steps[0]


@pytest.mark.parametrize(
    ("wrap", "mode"),
    [(eqx.filter_checkpoint, "parts"), deep((eqx.filter_jit, "sharded"))],
    ids=["checkpoint", "jit"],
)
def test_equinox_layers(wrap: Any, mode: str):
    model = Net(jax.random.key(0), wrap)
    step = make_train_step(of_module, SGD, num_shards=SHARDS, **MODES[mode])
    state = train(step, step.init(model), BATCHES)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda arrays, batch: of_module(eqx.combine(arrays, static), batch)
    want, _ = on_one_device(loss, SGD, arrays, BATCHES)
    got = step.model(state)
    assert_close(jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array)), jax.tree.leaves(want))
    np.testing.assert_array_equal(got.steps, np.arange(4))
    assert in_loop(step, model) == EXPECTED[mode]


# Linen and Haiku.


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, h: Any, _: Any) -> Any:
        return h + 0.5 * jnp.tanh(linen.Dense(WIDTH)(h)), None


class LinenStack(linen.Module):
    remat: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        layer = linen.remat(LinenLayer) if self.remat else LinenLayer
        scan = linen.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        h, _ = scan()(x, None)
        return linen.Dense(1)(h)[:, 0]


def _linen(remat: bool) -> tuple[Any, Any]:
    stack = LinenStack(remat)
    apply = lambda params, x: stack.apply({"params": params}, x)
    return stack.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"], apply


def _haiku(remat: bool) -> tuple[Any, Any]:
    def forward(x: Any) -> Any:
        layer = lambda h: h + 0.5 * jnp.tanh(hk.Linear(WIDTH)(h))
        layer = hk.remat(layer) if remat else layer
        h = hk.experimental.layer_stack(LAYERS)(layer)(x)
        return hk.Linear(1)(h)[:, 0]

    transformed = hk.without_apply_rng(hk.transform(forward))
    return transformed.init(jax.random.key(0), jnp.zeros((1, WIDTH))), transformed.apply


@pytest.mark.parametrize(("remat", "mode"), [(True, "parts"), deep((False, "sharded"))])
@pytest.mark.parametrize("make", [_linen, _haiku])
def test_functional_layers(make: Any, remat: bool, mode: str):
    params, apply = make(remat)
    loss = lambda params, batch: of_module(functools.partial(apply, params), batch)
    step = make_train_step(loss, SGD, num_shards=SHARDS, **MODES[mode])
    state = train(step, step.init(params), BATCHES)
    want, _ = on_one_device(loss, SGD, params, BATCHES)
    assert_close(state.params, want)
    assert in_loop(step, params) == EXPECTED[mode]
