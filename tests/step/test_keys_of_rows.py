"""rng_per="row": a key for each row, so that noise does not depend on the number of shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from crossshard.errors import ArgumentError
from tests.step.common import assert_close, train

ROWS, WIDTH = 16, 6


def params() -> Any:
    return {"w": jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / 3, "b": jnp.ones(WIDTH)}


def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32)} for _ in range(3)]


def noisy(params: Any, batch: Any, rng: Any) -> Any:
    def of_row(x: Any, key: Any) -> Any:
        drop, noise = jax.random.split(key)
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        hidden = jnp.where(jax.random.bernoulli(drop, 0.7, hidden.shape), hidden / 0.7, 0)
        return ((hidden @ params["w"] - x - jax.random.normal(noise, x.shape)) ** 2).mean()

    return jax.vmap(of_row)(batch["x"], rng).mean()


def on_one_device(optimizer: Any) -> Any:
    found = params()
    state = optimizer.init(found)
    for count, batch in enumerate(batches()):
        of_step = jax.random.fold_in(jax.random.key(5), count)
        keys = jax.vmap(lambda row, of_step=of_step: jax.random.fold_in(of_step, row))(
            jnp.arange(ROWS)
        )
        gradients = jax.grad(noisy)(found, batch, keys)
        updates, state = optimizer.update(gradients, state, found)
        found = optax.apply_updates(found, updates)
    return found


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.sgd(0.1), id="sgd"),
        pytest.param(optax.adamw(1e-2), id="adamw", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"num_shards": 1},
        {"num_shards": 2, "weight_update": "sharded"},
        {"num_shards": 8, "params": "sharded"},
        {"num_shards": 4, "accumulate_steps": 2},
        {"num_shards": 1, "accumulate_steps": 4},
        {"num_shards": 4, "loss_over": "batch"},
        {"num_shards": 4, "loss_over": "batch", "accumulate_steps": 2},
        {"num_shards": 4, "loss_over": "shard"},
    ],
    ids=str,
)
def test_noise_is_that_of_one_device(options: dict[str, Any], optimizer: Any):
    step = make_train_step(noisy, optimizer, rng_per="row", **options)
    state = train(step, step.init(params(), 5), batches())
    assert_close(step.model(state), on_one_device(optimizer))


def test_by_default_it_depends_on_the_number_of_shards():
    def with_one_key(params: Any, batch: Any, rng: Any) -> Any:
        return noisy(params, batch, jax.random.split(rng, len(batch["x"])))

    step = make_train_step(with_one_key, optax.sgd(0.1), num_shards=4)
    found = step.model(train(step, step.init(params(), 5), batches()))
    assert np.abs(found["w"] - on_one_device(optax.sgd(0.1))["w"]).max() > 1e-3


def test_a_loss_without_a_key_is_refused():
    with pytest.raises(ArgumentError, match="a key for each row"):
        make_train_step(lambda w, batch: w.sum(), optax.sgd(0.1), rng_per="row")


def test_another_word_is_refused():
    with pytest.raises(ArgumentError, match="rng_per"):
        make_train_step(noisy, optax.sgd(0.1), rng_per="example")
