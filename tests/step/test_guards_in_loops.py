"""Guards beside sums in loops: no more is sent, and what is not finite is left out and named."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import crossshard
from tests.quick import deep, deep_but
from tests.step import layered
from tests.step.common import assert_close, on_one_device
from tests.step.layered import BATCHES, PARAMS, ROWS, SHARDS, scan_loss, step_of

SGD = optax.sgd(0.01)
EACH = ROWS // SHARDS
REMAT = layered.CASES["remat"].loss


def poisoned(*shards: int, value: float = np.nan, batch: int = 0) -> dict[str, Any]:
    """A batch in which one row of each of these shards has a target that is not finite."""
    bad = np.isin(np.arange(ROWS), [EACH * shard + 2 for shard in shards])
    return {**BATCHES[batch], "y": np.where(bad, value, BATCHES[batch]["y"]).astype(np.float32)}


def of_others(batch: Any, *shards: int) -> Any:
    """The rows of the other shards."""
    kept = ~np.isin(np.arange(ROWS) // EACH, shards)
    return jax.tree.map(lambda x: x[kept], batch)


def large(step: Any) -> tuple[list[Any], float]:
    """The large collectives of a step in which all is finite, and the bytes of all of them."""
    report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), BATCHES[0]))
    always = [each for each in report.collectives if not each.in_branch]
    kinds = [(each.kind, each.times) for each in always if each.bytes_sent > 1 << 14]
    return sorted(kinds), sum(each.bytes_sent for each in always)


@pytest.mark.parametrize("mode", layered.MODES)
@pytest.mark.parametrize("nonfinite", ["skip", "quarantine"])
def test_guards_send_what_a_step_without_them_sends(mode: str, nonfinite: str):
    plain = large(step_of(mode, REMAT, optax.adam(0.1)))
    guarded = large(step_of(mode, REMAT, optax.adam(0.1), nonfinite=nonfinite))
    assert guarded[0] == plain[0]
    assert guarded[1] <= 1.01 * plain[1]


@pytest.mark.parametrize("mode", deep_but(["replicated", "parts"], layered.MODES))
@pytest.mark.parametrize("value", deep_but([np.nan], [np.nan, np.inf]), ids=str)
@pytest.mark.parametrize("shards", deep_but([[1]], [[1], [0, 3], [3]]), ids=str)
def test_the_others_train_as_one_device_on_their_rows(mode: str, value: float, shards: Any):
    step = step_of(mode, REMAT, SGD, nonfinite="quarantine")
    bad = poisoned(*shards, value=value)
    state, metrics = step(step.init(PARAMS), bad)
    state, after = step(state, BATCHES[1])
    found = metrics["nonfinite"]
    assert (int(found.shard), int(found.shards)) == (min(shards), len(shards))
    assert "embed" in found.describe(PARAMS)
    assert not bool(metrics["skipped"])
    assert int(after["nonfinite"].shard) == -1
    want, losses = on_one_device(REMAT, SGD, PARAMS, [of_others(bad, *shards), BATCHES[1]])
    assert_close(state.params, want)
    np.testing.assert_allclose(float(metrics["loss"]), losses[0], rtol=1e-5)


@pytest.mark.parametrize("mode", deep_but(["sharded"], layered.MODES))
def test_a_skipped_step_names_the_shard_and_changes_nothing(mode: str):
    step = step_of(mode, REMAT, SGD, nonfinite="skip")
    first = step.init(PARAMS)
    state, metrics = step(first, poisoned(2))
    assert (int(metrics["nonfinite"].shard), bool(metrics["skipped"])) == (2, True)
    assert_close(state.params, PARAMS, 0)
    state, metrics = step(state, BATCHES[0])
    assert_close(state.params, on_one_device(REMAT, SGD, PARAMS, BATCHES[:1])[0])
    assert int(metrics["nonfinite"].shard) == -1


def test_the_leaf_of_one_layer_is_named():
    """A layer whose own gradient alone is not finite, in a loop over the layers."""

    @jax.custom_vjp
    def explode(b: Any, flag: Any) -> Any:
        return b

    explode.defvjp(
        lambda b, flag: (b, flag), lambda flag, g: (jax.numpy.where(flag > 0, np.nan, g), None)
    )

    def turn(h: Any, p: Any) -> Any:
        # In the rows of shard 2 alone, and not on the way to the layers before.
        return layered.layer(h, {**p, "w": explode(p["w"], h[0, 0] * 0 + (h.max() > 90))})

    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"] + 100.0 * (batch["tag"][:, None] > 0)
        h = layered.scanned(h, params["layers"], turn)
        return layered.error(params, h, batch).mean()

    tag = (np.arange(ROWS) // EACH == 2).astype(np.float32)
    step = step_of("parts", loss, SGD, nonfinite="quarantine", loss_over="shard")
    _, metrics = step(step.init(PARAMS), {**BATCHES[0], "tag": tag})
    found = metrics["nonfinite"]
    assert int(found.shard) == 2
    assert found.describe(PARAMS) == "the gradient of `layers/w` is not finite on shard 2"


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
@pytest.mark.parametrize("steps", [1, 2])
def test_microbatches_and_weights_stand_beside_it(mode: str, steps: int):
    weight = np.where(np.arange(ROWS) % 3 == 0, 0.0, 1.0).astype(np.float32)

    def loss(params: Any, batch: Any) -> Any:
        h = layered.scanned(layered.embedded(params, batch), params["layers"])
        squares = layered.error(params, h, batch)
        return (squares * batch["weight"]).sum() / batch["weight"].sum()

    bad = {**poisoned(1), "weight": weight}
    step = step_of(mode, loss, SGD, nonfinite="quarantine", weight="weight", accumulate_steps=steps)
    state, metrics = step(step.init(PARAMS), bad)
    assert int(metrics["nonfinite"].shard) == 1
    assert_close(state.params, on_one_device(loss, SGD, PARAMS, [of_others(bad, 1)])[0])


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_a_mean_is_counted_without_the_shard(mode: str):
    weight = np.linspace(0.5, 2, ROWS, dtype=np.float32)

    def squares(params: Any, batch: Any) -> Any:
        h = layered.scanned(layered.embedded(params, batch), params["layers"])
        return layered.error(params, h, batch) * batch["weight"]

    def loss(params: Any, batch: Any) -> Any:
        return crossshard.Mean(squares(params, batch).sum(), batch["weight"].sum())

    def alone(params: Any, batch: Any) -> Any:
        return squares(params, batch).sum() / batch["weight"].sum()

    bad = {**poisoned(1), "weight": weight}
    step = step_of(mode, loss, SGD, nonfinite="quarantine")
    state, metrics = step(step.init(PARAMS), bad)
    assert int(metrics["nonfinite"].shard) == 1
    assert_close(state.params, on_one_device(alone, SGD, PARAMS, [of_others(bad, 1)])[0])


def test_all_shards_that_are_not_finite_skip_the_step():
    step = step_of("parts", scan_loss, SGD, nonfinite="quarantine")
    state, metrics = step(step.init(PARAMS), poisoned(0, 1, 2, 3))
    assert bool(metrics["skipped"])
    assert int(metrics["nonfinite"].shards) == SHARDS
    assert_close(state.params, PARAMS, 0)


def test_a_sum_that_overflows_is_told_from_summands_that_do():
    """Every shard's gradient is finite, and their sum is not."""

    def turn(h: Any, p: Any) -> Any:
        return h + 2e38 * p["w"][0, 0]

    def loss(params: Any, batch: Any) -> Any:
        return layered.scanned(0.0 * batch["y"], params["layers"], turn).mean()

    params = jax.tree.map(np.zeros_like, PARAMS)
    step = step_of("sharded", loss, SGD, nonfinite="quarantine")
    _, metrics = step(step.init(params), BATCHES[0])
    found = metrics["nonfinite"]
    assert bool(found.overflow)
    assert int(found.shard) == -1
    assert bool(metrics["skipped"])
