"""What strangers tried with make_train_step that was silently wrong, or failed without a word."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError
from tests.step.common import assert_close, sgd_step

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


def _by_keyword(w: Any, batch: Any, *, dropout_rng: Any = None) -> jax.Array:
    return noisy(w, batch, dropout_rng)


def _after_a_setting(w: Any, batch: Any, train: bool = True, key: Any = None) -> jax.Array:
    return noisy(w, batch, key if train else None)


def loss_of(loss: Any) -> float:
    step = sgd_step(loss, 0.1, 2)
    return float(step(step.init(W, 7), X)[1]["loss"])


@pytest.mark.parametrize("loss", [_by_position, _by_keyword, _after_a_setting])
def test_a_key_that_may_be_left_out_is_given(loss: Any):
    assert loss_of(loss) == loss_of(noisy) != loss_of(lambda w, batch: noisy(w, batch, None))


def test_a_key_that_was_bound_is_left_alone():
    for bound in (functools.partial(_by_position, rng=None), lambda w, batch: (batch @ w).mean()):
        np.testing.assert_allclose(loss_of(bound), (X @ W).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, batch, dropout_key: params * jax.random.uniform(dropout_key),
        lambda params, batch, seeds: params * jax.random.uniform(seeds),
        lambda params, batch, prngKey: params * jax.random.uniform(prngKey),
        lambda params, batch, *rest: params * jax.random.uniform(jax.random.key(len(rest))),
        lambda params, batch, _: params * batch.mean(),
    ],
)
def test_a_key_is_passed_to_a_third_parameter_named_like_one(loss_fn: Any):
    step = sgd_step(loss_fn, 0.1, 1)
    jax.eval_shape(step, step.abstract_init(jnp.float32(1)), np.ones(8, np.float32))


def test_a_setting_is_not_taken_for_a_key():
    def loss(w: Any, batch: Any, mask: Any = None, entry_key: str = "x") -> jax.Array:
        assert mask is None
        assert entry_key == "x"
        return (batch @ w).mean()

    np.testing.assert_allclose(loss_of(loss), (X @ W).mean(), rtol=1e-5)


@pytest.mark.parametrize("scalar", [0.5, 3, np.float32(0.5), jnp.float32(0.5)])
def test_a_scalar_in_the_batch_is_an_entry_that_every_shard_gets_whole(scalar: Any):
    loss = lambda w, batch: loss_fn(w, batch["x"]) * batch["rate"]
    batch = {"x": X, "rate": scalar}
    step = sgd_step(loss, 0.1, 8)
    with pytest.raises(ArgumentError, match=r"batch\['rate'\] is a scalar.*replicated_entries"):
        step(step.init(W), batch)
    step = sgd_step(loss, 0.1, 8, replicated_entries=("rate",))
    _, metrics = step(step.init(W), batch)
    np.testing.assert_allclose(metrics["loss"], loss_fn(W, X) * float(scalar), rtol=1e-5)


# What a step is, and what can be done with it.


def test_repr_says_what_it_is():
    opt = CrossShardOptimizer(optax.sgd(0.1), "sum")
    step = make_train_step(loss_fn, opt, num_shards=8)
    assert repr(step) == (
        "TrainStep(loss_fn on shards: 8; local gradient → sum over all shards → update)"
    )
    step.init(W)
    assert "→ update on every shard)" in repr(step)


def _descend(w: Any, x: Any, steps: int = 2) -> jax.Array:
    for _ in range(steps):
        w = w - 0.1 * jax.grad(loss_fn)(w, x)
    return loss_fn(w, x)


@pytest.mark.parametrize("opt", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.0)])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["grad", "jit(grad)"])
def test_a_step_can_be_differentiated(outer: Any, opt: Any):
    step = make_train_step(loss_fn, opt, num_shards=8)
    start = step.init(W)

    def through(w: Any, scale: Any) -> jax.Array:
        state = dataclasses.replace(start, params=w)
        for _ in range(3):
            state, metrics = step(state, scale * X)
        return metrics["loss"]

    got = outer(jax.grad(through, argnums=(0, 1)))(W, 1.0)
    expected = jax.grad(lambda w, scale: _descend(w, scale * X), argnums=(0, 1))(W, 1.0)
    assert_close(got, expected, 1e-6, 1e-4)


def test_a_batch_can_be_differentiated_from_a_state_that_lies_there():
    step = make_train_step(loss_fn, optax.adam(0.1), num_shards=8)
    start = step.init(W)
    got = jax.grad(lambda scale: step(start, scale * X)[1]["loss"])(1.0)
    np.testing.assert_allclose(got, jax.grad(lambda s: loss_fn(W, s * X))(1.0), rtol=1e-5)
    # It was not used up: a step outside of grad takes it.
    step(start, X)
