"""The state of a step whose parameters rest in parts: made, moved, read, compared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from tests.step.common import assert_close, on_one_device, train

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return np.float32(RNG.normal(size=shape) / 16)


# Stacked layers, a matrix that is gathered by itself, one that shares a bucket, and tiny ones.
PARAMS = {
    "layers": normal(3, 192, 192),
    "out": normal(192, 256),
    "few": normal(64, 32),
    "odd": normal(7, 5),
    "bias": np.zeros(3, np.float32),
}
BATCHES = 4 * normal(3, 24, 192)


def loss_fn(params: Any, x: Any) -> jax.Array:
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    of_others = ((params["few"] - 1) ** 2).mean() + (params["odd"] ** 2).sum()
    return ((x @ params["out"] - 1) ** 2).mean() + of_others + (params["bias"] - 1).sum() ** 2


OPTIMIZERS = {"sgd": lambda: optax.sgd(0.1, 0.9), "adamw": lambda: optax.adamw(1e-2, eps=1e-4)}


def step_of(number: int = 4, optimizer: str = "sgd", **options: Any) -> Any:
    how = {"num_shards": number, "params": "sharded", **options}
    return make_train_step(loss_fn, OPTIMIZERS[optimizer](), **how)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_that_share_a_bucket_rest_in_parts_too(optimizer: str):
    step = step_of(8, optimizer)
    state = train(step, step.init(PARAMS), BATCHES)
    assert not state.params["few"].is_fully_replicated
    want, _ = on_one_device(loss_fn, OPTIMIZERS[optimizer](), PARAMS, BATCHES)
    assert_close(state.params, want, 2e-6)
