"""Stacked layers of NNX: summed in their loops, gathered in them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import crossshard
from tests.step.common import assert_close, train
from tests.step.layered import BATCHES, LAYERS, WIDTH, step_of

SGD = optax.sgd(0.05)


def in_loop(step: Any, model: Any) -> set[str]:
    """The kinds of collectives that run once for each layer and move one of its matrices."""
    report = crossshard.inspect(step.lower(step.abstract_init(model), BATCHES[0]))
    moves = lambda each: each.bytes_sent >= LAYERS * WIDTH * WIDTH
    return {each.kind for each in report.collectives if each.times == LAYERS and moves(each)}


def of_module(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


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
