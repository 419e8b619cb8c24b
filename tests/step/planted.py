"""Lines that make a NaN or an infinity of some rows, to be planted in a loss."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SHARDS, ROWS, WIDTH, LENGTH = 8, 32, 8, 4
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


def all_masked(h: Any, bad: Any) -> Any:
    masked = jnp.where(bad > 0, -jnp.inf, h)
    # The first of a row is always masked, which is no fault.
    masked = jnp.where(jnp.arange(h.shape[-1]) == 0, -jnp.inf, masked)
    return h + jax.nn.softmax(masked, axis=-1)  # here


FAULTS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (where_log, norm, divide, exponential, all_masked)
}


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
