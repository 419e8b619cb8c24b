"""Merged: the model state of all shards, of metrics and counters that each of them has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from crossshard import make_train_step
from crossshard.errors import ArgumentError, CheckpointWarning
from tests.step.common import assert_close

ROWS = 16
RNG = np.random.default_rng(0)
# Shards differ, and count 1 to 4 of their rows.
BATCHES = [
    {
        "x": np.float32(RNG.normal(size=(ROWS, 3)) + 1 + np.arange(ROWS)[:, None] // 4),
        "mask": np.arange(ROWS) % 4 <= np.arange(ROWS) // 4,
    }
    for _ in range(3)
]


class Measured(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))
        self.metrics = nnx.MultiMetric(mean=nnx.metrics.Average(), spread=nnx.metrics.Welford())


def loss_fn(model: Measured, batch: Any) -> jax.Array:
    losses = (batch["x"] @ model.w[...]) ** 2
    seen = jax.lax.stop_gradient(losses)
    model.metrics.mean.update(values=seen, mask=batch["mask"])
    model.metrics.spread.update(values=seen)
    return losses.mean()


def step_on(shards: int, loss: Any = loss_fn, **options: Any) -> Any:
    return make_train_step(loss, optax.sgd(1e-3), num_shards=shards, **options)


def measured(model: Measured) -> Any:
    spread = model.metrics.spread
    return model.metrics.mean.compute(), spread.count[...], spread.compute().standard_deviation


def test_metrics_are_those_of_all_rows_also_on_other_shards() -> None:
    one = step_on(1)
    expected = one.init(Measured())
    step, state = step_on(4), step_on(4).init(Measured())
    for shards, batch in zip((4, 2, 8), BATCHES, strict=True):
        if shards != 4:
            step = step_on(shards)
            state = step.reshard(state)
        state, _ = step(state, batch)
        expected, _ = one(expected, batch)
        found = measured(step.model(state))
        assert_close(found, measured(one.model(expected)), rtol=1e-5)
    assert found[1] == 3 * ROWS
    of_rows = lambda model, batch: jnp.full(len(batch["x"]), model.metrics.mean.compute())
    assert_close(step.evaluate(state, BATCHES[:1], of_rows), found[0], rtol=1e-5)
    # A model that was trained goes on with what its metrics have counted, once.
    again = step_on(2)
    state, _ = again(again.init(step.model(state)), BATCHES[0])
    expected, _ = one(expected, BATCHES[0])
    assert_close(measured(again.model(state)), measured(one.model(expected)), rtol=1e-5)


def usage(w: Any, used: Any, batch: Any) -> tuple[jax.Array, Any]:
    losses = (batch["x"] @ w) ** 2
    return losses.mean(), used + batch["mask"].sum()


class Largest(nnx.Metric):
    def __init__(self) -> None:
        self.value = nnx.metrics.MetricState(jnp.float32(0))


@pytest.mark.parametrize("kind", [None, "metric", "per_shard"])
def test_of_a_counter_that_differs_only_the_user_knows_what_it_is(kind: str | None) -> None:
    is_module, of_state = kind != "per_shard", None if kind == "metric" else kind

    class Counting(nnx.Module):
        def __init__(self) -> None:
            self.w, self.largest = nnx.Param(jnp.ones(3)), Largest()
            self.used = self.largest.value if kind == "metric" else nnx.Variable(jnp.int32(0))

    def counting(model: Counting, batch: Any) -> jax.Array:
        loss, model.used[...] = usage(model.w[...], model.used[...], batch)
        return loss

    def made(shards: int) -> Any:
        return step_on(shards, counting if is_module else usage, model_state=of_state)

    step = made(4)
    given = {} if is_module else {"model_state": jnp.int32(0)}
    state = step.init(Counting() if is_module else jnp.ones(3), **given)
    assert step.model(state) is not None
    state, _ = step(state, BATCHES[0])
    values = lambda *_: jnp.ones(ROWS)
    for read in (step.model, lambda state: step.evaluate(state, BATCHES[:1], values)):
        with pytest.raises(ArgumentError, match=r"differs between the shards.*shard=0.*psum"):
            read(state)
    found = [step.model(state, shard=shard) for shard in range(4)]
    used = [model.used[...] if is_module else model[1] for model in found]
    np.testing.assert_array_equal(used, [1, 2, 3, 4])
    with pytest.warns(CheckpointWarning, match=r"differs between the shards of the state"):
        moved = made(2).reshard(state)
    assert made(2).model(moved) is not None
