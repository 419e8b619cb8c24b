"""Models for whole steps: MLPs, the demo's transformer, and tiny layers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.problem import Problem, of_tree
from examples.byte_lm.model import VOCABULARY, ByteTransformer, loss

_MLP_LAYERS = 4
# Over all shards, so that the computation is the same for most numbers of shards.
_MLP_ROWS = 32
_ROWS, _CONTEXT = 16, 64
_WORDS, _SCANNED_ROWS = 256, 128


def mlp(parameters: int, shards: int) -> Problem:
    """Four dense layers of one width, as a tree of arrays, with about this many parameters."""
    # A multiple of eight, which is fast in every kernel.
    width = 8 * max(1, round(math.sqrt(parameters / _MLP_LAYERS) / 8))
    random = np.random.default_rng(0)
    params = [
        {
            "kernel": random.normal(0, math.sqrt(2 / width), (width, width)).astype(np.float32),
            "bias": np.zeros(width, np.float32),
        }
        for _ in range(_MLP_LAYERS)
    ]
    rows = _divisible(_MLP_ROWS, shards)
    x, y = random.normal(size=(2, rows, width)).astype(np.float32)
    return of_tree(params, _mlp_loss, {"x": x, "y": y})


def _mlp_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((x @ params[-1]["kernel"] + params[-1]["bias"] - batch["y"]) ** 2)


def matrices(
    shards: int,
    optimizer: optax.GradientTransformation,
    *,
    layers: int = 24,
    width: int = 352,
    stacked: bool = False,
) -> Problem:
    """Dense layers without biases, as a tree of matrices or as one stack of them."""
    random = np.random.default_rng(0)
    stack = random.normal(0, width**-0.5, (layers, width, width)).astype(np.float32)
    params: Any = {"layers": stack} if stacked else [{"kernel": each} for each in stack]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        layer = lambda x, w: (jax.nn.gelu(x @ w), None)
        x = batch["x"]
        if stacked:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        else:
            for each in params:
                x, _ = layer(x, each["kernel"])
        return jnp.mean((x - batch["y"]) ** 2)

    x, y = random.normal(size=(2, _divisible(_MLP_ROWS, shards), width)).astype(np.float32)
    problem = of_tree(params, loss_fn, {"x": x, "y": y})
    return dataclasses.replace(problem, optimizer=optimizer)


def scanned(shards: int, *, layers: int = 8, width: int = 512) -> Problem:
    """Embedded words through stacked MLP blocks: `lax.scan` and `jax.checkpoint`, as a tree."""
    random = np.random.default_rng(0)
    normal = lambda *shape: random.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)
    params = {
        "words": normal(_WORDS, width),
        "up": normal(layers, width, 4 * width),
        "down": normal(layers, 4 * width, width),
    }
    words = random.integers(_WORDS, size=(2, _divisible(_SCANNED_ROWS, shards)), dtype=np.int32)
    return of_tree(params, _scanned_loss, dict(zip(("read", "wanted"), words, strict=True)))


def _scanned_loss(params: Any, batch: Any) -> jax.Array:
    @jax.checkpoint
    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None

    layers = {name: params[name] for name in ("up", "down")}
    x, _ = jax.lax.scan(block, params["words"][batch["read"]], layers)
    scores = x @ params["words"].T
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["wanted"]).mean()


def transformer(shards: int, *, layers: int = 3, width: int = 160) -> Problem:
    """The model of `examples/byte_lm`, an NNX module, with that example's default sizes."""
    model = nnx.jit(lambda: ByteTransformer(layers=layers, width=width, rngs=nnx.Rngs(0)))()
    rows = _divisible(_ROWS, shards)
    text = np.random.default_rng(0).integers(VOCABULARY, size=(rows, _CONTEXT + 1), dtype=np.uint8)
    loss_fn = lambda model, batch: loss(model, batch)[0]
    return _of_module(model, loss_fn, {"read": text[:, :-1], "wanted": text[:, 1:]})


def linear_layers(shards: int, *, layers: int, width: int = 8) -> Problem:
    """An NNX module of this many small layers, which computes almost nothing."""
    model = nnx.List([nnx.Linear(width, width, rngs=nnx.Rngs(0)) for _ in range(layers)])

    def loss_fn(model: Any, x: jax.Array) -> jax.Array:
        for layer in model:
            x = layer(x)
        return jnp.mean(x**2)

    return _of_module(model, loss_fn, np.ones((shards, width), np.float32))


def _of_module(module: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any) -> Problem:
    graph, params = nnx.split(module, nnx.Param)
    return Problem(
        model=module,
        loss_fn=loss_fn,
        params=params,
        value_and_grad=jax.value_and_grad(
            lambda params, batch: loss_fn(nnx.merge(graph, params), batch)
        ),
        batch=batch,
    )


def _divisible(rows: int, shards: int) -> int:
    return math.ceil(rows / shards) * shards
