"""What strangers tried with make_train_step that was silently wrong, or failed without a word."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from tests.quick import deep
from tests.step.common import sgd_step

RNG = np.random.default_rng(0)
W = RNG.normal(size=(5, 3)).astype(np.float32)
X = RNG.normal(size=(8, 5)).astype(np.float32)


def loss_fn(w: Any, batch: Any) -> jax.Array:
    return (jnp.tanh(batch @ w) ** 2).mean()


# The key of a loss that may be left out.


def noisy(w: Any, batch: Any, rng: Any) -> jax.Array:
    noise = 0.0 if rng is None else jax.random.normal(rng, ())
    return (batch @ w).mean() + noise


def _by_position(w: Any, batch: Any, rng: Any = None) -> jax.Array:
    return noisy(w, batch, rng)


def _after_settings(w: Any, batch: Any, train: bool = True, entry_key: Any = "x", key: Any = None):
    assert entry_key == "x"
    return noisy(w, batch, key if train else None)


def _with_settings_alone(w: Any, batch: Any, mask: Any = None, entry_key: str = "x") -> jax.Array:
    assert (mask, entry_key) == (None, "x")
    return (batch @ w).mean()


GIVEN = [
    _by_position,
    _after_settings,
    lambda w, batch, *, dropout_rng=None: noisy(w, batch, dropout_rng),
    # Of the third one that must be given, the name is enough.
    lambda w, batch, dropout_key: noisy(w, batch, dropout_key),
    lambda w, batch, _: noisy(w, batch, _),
]
NOT_GIVEN = [
    functools.partial(_by_position, rng=None),
    lambda w, batch: (batch @ w).mean(),
    lambda w, batch, *rest: noisy(w, batch, *rest, None),
    _with_settings_alone,
]


@functools.cache
def loss_of(loss: Any) -> float:
    step = sgd_step(loss, 0.1, 2)
    return float(step(step.init(W, 7), X)[1]["loss"])


@pytest.mark.parametrize("loss", [*GIVEN[:4], *map(deep, GIVEN[4:])])
def test_a_key_is_given_to_what_is_named_like_one(loss: Any):
    assert loss_of(loss) == loss_of(noisy) != loss_of(_with_settings_alone)


@pytest.mark.parametrize("loss", NOT_GIVEN)
def test_no_key_is_given_to_what_was_bound_or_is_a_setting(loss: Any):
    np.testing.assert_allclose(loss_of(loss), (X @ W).mean(), rtol=1e-5)


# What a step is, and what can be done with it.


def test_a_batch_can_be_differentiated_from_a_state_that_lies_there():
    step = make_train_step(loss_fn, optax.adam(0.1), num_shards=8)
    start = step.init(W)
    got = jax.grad(lambda scale: step(start, scale * X)[1]["loss"])(1.0)
    np.testing.assert_allclose(got, jax.jit(jax.grad(lambda s: loss_fn(W, s * X)))(1.0), rtol=1e-5)
    # It was not used up: a step outside of grad takes it.
    step(start, X)
