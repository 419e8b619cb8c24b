"""A loss takes one batch, and a key that is named like one; a step takes a state and a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import ArgumentTypeError, make_train_step

X = np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("loss_fn", "names"),
    [
        (lambda params, x, y: ((params * x - y) ** 2).mean(), ("'x': x, 'y': y", "call it rng")),
        (lambda params, x, y, z: (params * x).mean(), ("'x': x, 'y': y, 'z': z",)),
        (lambda params, images, keypoints: images.mean(), ("'keypoints' is not named",)),
        (lambda params, x, y, rng: (params * x - y).mean(), ("'x': x, 'y': y}",)),
    ],
)
def test_arrays_beside_the_batch_are_refused_at_construction(loss_fn: Any, names: Any):
    with pytest.raises(ArgumentTypeError) as raised:
        make_train_step(loss_fn, optax.sgd(0.1), num_shards=8)
    for name in names:
        assert name in str(raised.value)


def test_beside_model_state_too():
    with pytest.raises(ArgumentTypeError, match=r"\(params, model_state, batch\), which reads"):
        make_train_step(
            lambda params, stats, x, y: (x.mean(), stats), optax.sgd(0.1), model_state="mean"
        )


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
    step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1)
    jax.eval_shape(step, step.abstract_init(jnp.float32(1)), X)


def test_a_step_takes_one_batch():
    step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=8)
    state = step.init(jnp.float32(1))
    with pytest.raises(ArgumentTypeError, match=r"got 1 more: ndarray.*\{'x': x, 'y': y\}"):
        step(state, X, X)
    step(state, X)


def test_a_forgotten_has_aux_is_named():
    step = make_train_step(lambda w, x: ((w * x).mean(), 1), optax.sgd(0.1), num_shards=8)
    with pytest.raises(ArgumentTypeError, match=r"returned \(loss, aux\).*pass has_aux=True"):
        step(step.init(jnp.float32(1)), X)
