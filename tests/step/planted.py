"""Models in which a fault is planted: a line that makes a NaN or an infinity of some rows."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import crossshard

SHARDS, ROWS, WIDTH, LENGTH, LAYERS = 8, 32, 8, 4, 3
MARK = "# here"


# Each takes activations [rows, …, width], and which rows are bad, of the same shape, 0 or 1. It is
# finite, as is its gradient, in all other rows.


def where_log(h: Any, bad: Any) -> Any:
    s = jax.nn.sigmoid(h) * (1 - bad)
    return h + jnp.where(s > 0, jnp.log(s), 0.0)  # here


def norm(h: Any, bad: Any) -> Any:
    s = h * (1 - bad)
    return h + jnp.sqrt((s**2).sum(-1, keepdims=True))  # here


def divide(h: Any, bad: Any) -> Any:
    s = (2 + jnp.tanh(h)) * (1 - bad)
    return h / s.mean(-1, keepdims=True)  # here


def exponential(h: Any, bad: Any) -> Any:
    z = jnp.tanh(h) + 1000 * bad
    return h + jnp.exp(z)  # here


def overflow(h: Any, bad: Any) -> Any:
    z = (jnp.tanh(h) + 60000 * bad).astype(jnp.float16)
    return h + (z + z).astype(h.dtype)  # here


def empty_mask(h: Any, bad: Any) -> Any:
    total = (h * (1 - bad)).sum(-1, keepdims=True)
    count = (1 - bad).sum(-1, keepdims=True)
    return h + total / count  # here


def all_masked(h: Any, bad: Any) -> Any:
    masked = jnp.where(bad > 0, -jnp.inf, h)
    # The first of a row is always masked, which is no fault.
    masked = jnp.where(jnp.arange(h.shape[-1]) == 0, -jnp.inf, masked)
    return h + jax.nn.softmax(masked, axis=-1)  # here


def power(h: Any, bad: Any) -> Any:
    s = jax.nn.sigmoid(h) * (1 - bad)
    return h + s**0.3  # here


def angle(h: Any, bad: Any) -> Any:
    s = jax.nn.sigmoid(h) * (1 - bad)
    return h + jnp.arctan2(s, s)  # here


def nothing(h: Any, bad: Any) -> Any:
    return h


FAULTS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        where_log,
        norm,
        divide,
        exponential,
        overflow,
        empty_mask,
        all_masked,
        power,
        angle,
    )
}
# The row itself is NaN.
FAULTS["of_batch"] = nothing


def line_of(fault: Callable[..., Any]) -> int:
    """The number of the line of a fault, in this file."""
    lines, first = inspect.getsourcelines(fault)
    return next(first + i for i, line in enumerate(lines) if MARK in line)


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: np.float32(rng.normal(size=shape))
    return {
        "x": normal(ROWS, LENGTH, WIDTH),
        "y": normal(ROWS, WIDTH),
        "bad": np.zeros(ROWS, np.float32),
    }


def planted(fault: Any, h: Any, batch: Any) -> Any:
    flags = batch["bad"].reshape(-1, *[1] * (h.ndim - 1))
    return fault(h, jnp.broadcast_to(flags, h.shape).astype(h.dtype))


def normal(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return np.float32(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1))


def mse(h: Any, batch: Any) -> Any:
    h = h.astype(jnp.float32).reshape(len(h), -1)[:, :WIDTH]
    return ((h - batch["y"]) ** 2).mean()


class Model:
    """A loss, its parameters and the options of its step."""

    def __init__(self, loss: Any, initial: Any, optimizer: Any = None, **options: Any):
        self.initial = initial
        self.step = crossshard.make_train_step(
            loss,
            optimizer or optax.adam(1e-3),
            num_shards=SHARDS,
            donate=False,
            nonfinite="skip",
            **options,
        )


def mlp(fault: Any, dtype: Any = jnp.float32, **options: Any) -> Model:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"].reshape(len(batch["x"]), -1).astype(dtype)
        h = jax.nn.relu(h @ params["first"].astype(dtype))
        h = planted(fault, h, batch)
        return mse(h @ params["second"].astype(dtype), batch)

    params = {"first": normal(LENGTH * WIDTH, WIDTH), "second": normal(WIDTH, WIDTH)}
    return Model(loss, params, **options)


def _block(layer: Any, h: Any) -> Any:
    q, k, v = (h @ layer[name] for name in "qkv")
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    h = h + weights @ v
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]


def transformer(fault: Any, *, checkpointed: bool = False, **options: Any) -> Model:
    def loss(params: Any, batch: Any) -> Any:
        def body(h: Any, given: Any) -> Any:
            layer, index = given
            h = _block(layer, h)
            # Only in the second layer.
            here = {**batch, "bad": batch["bad"] * (index == 1)}
            return planted(fault, h, here), None

        body = jax.checkpoint(body) if checkpointed else body
        h, _ = lax.scan(body, batch["x"], (params, jnp.arange(LAYERS)))
        return mse(h, batch)

    names = {**dict.fromkeys("qkv", WIDTH), "up": 2 * WIDTH}
    params = {name: normal(LAYERS, WIDTH, size) for name, size in names.items()}
    params["down"] = normal(LAYERS, 2 * WIDTH, WIDTH)
    return Model(loss, params, **options)


class WithBatchNorm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(LENGTH * WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def flax_model(fault: Any) -> Model:
    def loss(model: WithBatchNorm, batch: Any) -> Any:
        h = model.first(batch["x"].reshape(len(batch["x"]), -1))
        h = planted(fault, jax.nn.relu(model.norm(h)), batch)
        return mse(model.second(h), batch)

    return Model(loss, WithBatchNorm(nnx.Rngs(0)), loss_over="shard")


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.MLP

    def __init__(self, key: Any):
        self.first = eqx.nn.Linear(LENGTH * WIDTH, WIDTH, key=key)
        self.second = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)


def equinox(fault: Any) -> Model:
    def loss(model: Equinox, batch: Any) -> Any:
        h = jax.nn.tanh(jax.vmap(model.first)(batch["x"].reshape(len(batch["x"]), -1)))
        h = planted(fault, h, batch)
        return mse(jax.vmap(model.second)(h), batch)

    return Model(loss, Equinox(jax.random.key(0)))


def convolutions(fault: Any) -> Model:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"][..., None]
        for place, kernel in enumerate(params):
            h = lax.conv_general_dilated(
                h, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jax.nn.relu(h)
            h = planted(fault, h, batch) if place == 0 else h
        return mse(h.mean((1, 2)), batch)

    return Model(loss, [normal(3, 3, 1, 4), normal(3, 3, 4, WIDTH)])


MODELS: dict[str, Callable[[Any], Model]] = {
    "mlp": mlp,
    "scanned transformer": transformer,
    "checkpointed": lambda fault: transformer(fault, checkpointed=True),
    "NNX with BatchNorm": flax_model,
    "Equinox": equinox,
    "params='sharded'": lambda fault: transformer(fault, params="sharded"),
    "Muon": lambda fault: mlp(fault, optimizer=optax.contrib.muon(1e-3)),
    "bfloat16": lambda fault: mlp(fault, jnp.bfloat16),
    "float16 with a loss scale": lambda fault: mlp(
        fault, jnp.float16, loss_scale=crossshard.DynamicLossScale(128.0)
    ),
    "convolutions": convolutions,
    "accumulation": lambda fault: mlp(fault, accumulate_steps=2),
}
