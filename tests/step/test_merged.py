"""Merged: the model state of all shards, of metrics and counters that each of them has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from crossshard import CrossShardOptimizer, make_train_step
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


class Normalized(nnx.Module):
    """Reads a metric of each feature of some rows, and has a key that nobody reads."""

    def __init__(self, rows: Any = None) -> None:
        self.w, self.key = nnx.Param(jnp.ones(3)), nnx.Variable(jax.random.key(0))
        self.seen = nnx.metrics.Welford()
        for name in ("mean", "m2"):
            setattr(self.seen, name, nnx.metrics.MetricState(jnp.zeros(3)))
        self.seen.count.set_value(jnp.uint16(0))
        if rows is not None:
            self.seen.count.set_value(jnp.uint16(len(rows)))
            self.seen.mean.set_value(rows.mean(0))
            self.seen.m2.set_value(rows.var(0) * len(rows))


def normalized(model: Normalized, batch: Any) -> jax.Array:
    spread = jnp.sqrt(model.seen.m2[...] / model.seen.count[...])
    return (((batch["x"] - model.seen.mean[...]) / spread @ model.w[...]) ** 2).mean()


def test_a_loss_reads_a_metric_that_all_shards_have() -> None:
    rows, found = BATCHES[2]["x"], []
    for shards in ([1, 1, 1], [4, 2, 8]):
        step = step_on(shards[0], normalized)
        state, losses = step.init(Normalized(rows)), []
        for number, batch in zip(shards, BATCHES, strict=True):
            step = step_on(number, normalized)
            state, metrics = step(step.reshard(state), batch)
            losses.append(metrics["loss"])
        model = step.model(state)
        assert model.seen.count[...].dtype == jnp.uint16
        assert model.seen.count[...] == ROWS
        found.append((losses, model.w[...], model.seen.mean[...], model.seen.m2[...]))
    assert_close(*found, rtol=1e-5)


def test_what_is_counted_over_all_shards_counts_once() -> None:
    def gathered(model: Measured, batch: Any) -> jax.Array:
        losses = (batch["x"] @ model.w[...]) ** 2
        seen = jax.lax.all_gather(jax.lax.stop_gradient(losses), "shards", tiled=True)
        model.metrics.spread.update(values=seen)
        return losses.mean()

    step = step_on(4, gathered)
    state, _ = step(step.init(Measured()), BATCHES[0])
    two = step_on(2, gathered)
    state, _ = two(two.reshard(state), BATCHES[1])
    assert two.model(state).metrics.spread.count[...] == 2 * ROWS


def test_a_shard_that_does_not_count_leaves_all_of_a_metric() -> None:
    def weighted(model: Measured, batch: Any) -> jax.Array:
        losses = (batch["x"] @ model.w[...]) ** 2
        model.metrics.spread.update(values=jax.lax.stop_gradient(losses))
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    step, mask = step_on(4, weighted, weight="mask"), np.arange(ROWS) < 12
    state, _ = step(step.init(Measured()), BATCHES[0] | {"mask": mask})
    found = step.model(state).metrics.spread
    seen = (BATCHES[0]["x"][mask].sum(1)) ** 2
    assert_close((found.count[...], found.mean[...]), (12, seen.mean()), rtol=1e-5)


def test_groups_go_on_with_a_metric_each() -> None:
    groups = [[0, 2], [1, 3]]
    opt = CrossShardOptimizer(optax.sgd(1e-3), group_assignment=groups)
    step = make_train_step(normalized, opt, num_shards=4)
    state = step.init(Normalized(BATCHES[2]["x"]))
    counts = [int(step.model(state, shard=shard).seen.count[...]) for shard in range(4)]
    assert [sum(counts[shard] for shard in group) for group in groups] == [ROWS, ROWS]
