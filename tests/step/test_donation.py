"""A batch that holds a buffer of the state is refused, unless the state is not donated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError
from tests.step.common import sgd_step

X = np.ones((8, 1024), np.float32)
W = np.ones(1024, np.float32)


def loss_fn(w: Any, batch: Any) -> jax.Array:
    return ((batch["x"] @ (w - batch["target"])) ** 2).mean()


def step_of(shards: int, **options: Any) -> Any:
    names = ["target"]
    return make_train_step(
        loss_fn, optax.adam(0.1), num_shards=shards, replicated_entries=names, **options
    )


SHARING: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda step, w: w,
    "the same shape": lambda step, w: w.reshape(1024),
    "another object": lambda step, w: jax.device_put(
        w, NamedSharding(step.mesh, PartitionSpec(None))
    ),
    "the last device's": lambda step, w: w.addressable_data(step.mesh.size - 1),
}


def test_an_array_of_the_state_in_the_batch_is_named():
    step = step_of(8)
    state, _ = step(step.init(W), {"x": X, "target": 0 * W})  # with buffers of the step's own
    for share in SHARING.values():
        with pytest.raises(ArgumentError, match=r"batch\['target'\] .* state\.params,.*jnp\.copy"):
            step(state, {"x": X, "target": share(step, state.params)})
    # Copies, views of numpy and what is as long are fine, and the state is still there.
    for other in (jnp.copy(state.params), np.array(state.params), jnp.zeros(1024)):
        state, _ = step(state, {"x": X, "target": other})
    moment = state.opt_state.inner_state[0].mu
    with pytest.raises(ArgumentError, match=r"state\.opt_state\.inner_state\[0\]\.mu,"):
        step(state, {"x": X, "target": moment})


def test_rows_that_are_the_state_are_named():
    step = sgd_step(lambda w, x: (w.sum() * x).mean(), 0.1, 1)
    state = step.init(W)
    with pytest.raises(ArgumentError, match=r"batch shares its buffer with state\.params,"):
        step(state, state.params)


def test_a_state_that_is_not_donated_stays_valid():
    step, donating = step_of(8, donate=False), step_of(8)
    state = step.init(W)
    after, metrics = step(state, {"x": X, "target": state.params})
    assert metrics["loss"] == 0
    again, _ = step(state, {"x": X, "target": 0 * W})
    expected, _ = donating(donating.init(W), {"x": X, "target": 0 * W})
    np.testing.assert_array_equal(again.params, expected.params)
    np.testing.assert_array_equal(after.params, state.params)
    with pytest.raises(ArgumentTypeError, match="donate must be"):
        step_of(8, donate="no")


def test_an_error_of_a_step_that_has_donated_its_state_is_its_own():
    calls: list[int] = []

    def failing(x: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("of the caller")
        return x

    def loss(w: Any, x: Any) -> Any:
        return (jax.pure_callback(failing, jax.typeof(x), x) * w[:1]).mean()

    step = sgd_step(loss, 0.1, 1)
    state = step.init(W)
    state, _ = step(state, X[0])
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="of the caller"):
        jax.block_until_ready(step(state, X[0]))
