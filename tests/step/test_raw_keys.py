"""Raw keys, as jax.random.PRNGKey and Keras hold them, differ between shards, or are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from crossshard import shard
from crossshard.errors import ArgumentError
from tests.step.common import sgd_step

X = np.ones((8, 4), np.float32)
W = np.ones(4, np.float32)


def noise_of(key: Any) -> jax.Array:
    return jax.random.uniform(key, (4,))


def step_of(key_of: Any, num_shards: int = 8) -> Any:
    def loss_fn(w: Any, state: Any, x: Any) -> Any:
        noise = noise_of(key_of(state))
        new = jax.tree.map(lambda key: jax.random.split(key)[0], state)
        return (x @ w).mean() + 0 * noise.sum(), (new, noise)

    return sgd_step(loss_fn, 0.1, num_shards, model_state="per_shard", has_aux=True)


def test_a_raw_key_that_is_called_so_follows_the_typed_one():
    key_of = lambda state: state["layer"]["seed"]
    step = step_of(key_of)
    raw, typed = (
        step.init(W, model_state={"layer": {"seed": key}})
        for key in (jax.random.PRNGKey(1), jax.random.key(1))
    )
    np.testing.assert_array_equal(
        key_of(raw.model_state), jax.random.key_data(key_of(typed.model_state))
    )


def test_keys_stay_different_and_are_made_so_again_on_another_number_of_shards():
    step, fewer = (step_of(lambda state: state["rng"], number) for number in (8, 2))
    state = step.init(W, model_state={"rng": jax.random.PRNGKey(1)})
    for _ in range(2):
        state, metrics = step(state, X)
        assert len(np.unique(metrics["aux"], axis=0)) == 8
    _, metrics = fewer(fewer.reshard(step.unshard(state)), X)
    assert len(np.unique(metrics["aux"], axis=0)) == 2


@pytest.mark.parametrize(
    "state", [[jnp.zeros(3), jax.random.PRNGKey(1)], {"state": np.uint32([7, 0])}]
)
def test_what_may_be_a_key_is_refused_with_what_to_write(state: Any):
    step = step_of(lambda state: jax.tree.leaves(state)[-1])
    for init in (step.init, step.abstract_init):
        with pytest.raises(ArgumentError, match=r"uint32\[2\].*wrap_key_data.*int32"):
            init(W, model_state=state)
    # What the error advises, for a list of Keras' variables.
    step = step_of(lambda state: jax.random.key_data(jax.tree.leaves(state)[-1]))
    typed = jax.tree.map(
        lambda x: jax.random.wrap_key_data(x) if x.dtype == np.uint32 else jnp.int32(x), state
    )
    typed = jax.tree.leaves(typed)[-1:]
    _, metrics = step(step.init(W, model_state=typed), X)
    assert len(np.unique(metrics["aux"], axis=0)) == 8


class Noisy(nnx.Module):
    def __init__(self, key: Any):
        self.w = nnx.Param(jnp.asarray(W))
        self.rngs = nnx.Rngs(key)
        self.rng = nnx.Variable(key)

    def __call__(self, x: Any) -> Any:
        noise = noise_of(self.rngs()), noise_of(self.rng[...])
        return (x @ self.w[...]).mean() + 0 * noise[0].sum(), jnp.stack(noise)


def test_modules_with_raw_keys():
    make = jax.random.PRNGKey
    step = sgd_step(lambda m, x: m(x), 0.1, 8, has_aux=True)
    _, metrics = step(step.init(Noisy(make(0))), X)
    for of in range(2):
        assert len(np.unique(metrics["aux"][:, of], axis=0)) == 8
    model = Noisy(make(0))
    del model.rng
    found = shard(num_shards=8)(lambda model, x: noise_of(model.rngs())[None])(model, X)
    assert len(np.unique(found, axis=0)) == 8


def test_a_variable_that_may_be_a_key_is_refused():
    model = Noisy(jax.random.key(0))
    model.counts = nnx.RngCount(jnp.zeros(2, jnp.uint32), tag="of two streams")
    model.hits = nnx.Variable(jnp.zeros(2, jnp.uint32))
    step = sgd_step(lambda m, x: m(x), 0.1, 8, has_aux=True)
    with pytest.raises(ArgumentError, match=r"model_state\['hits'\] is uint32\[2\]"):
        step.init(model)
