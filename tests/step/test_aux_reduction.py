"""aux_reduction: what a loss returns besides its value, each shard's, averaged or summed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError
from tests.quick import deep
from tests.step.common import sgd_step

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
MASK = np.array([1, 1, 1, 0, 1, 1, 0, 0], np.float32)
BATCH = {"x": X, "mask": MASK}


def loss_fn(w: Any, batch: Any) -> tuple[jax.Array, Any]:
    rows, counts = (batch["x"] @ w) ** 2, batch["mask"]
    # NaN on a shard without counted rows.
    mean = (rows * counts).sum() / counts.sum()
    aux = {"mean": mean, "features": batch["x"].sum(0), "count": (counts > 0).sum(), "none": None}
    return mean, aux


W = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("weight_update", "microbatches"), [("replicated", 1), ("replicated", 2), deep(("sharded", 2))]
)
def test_a_prefix_says_how_each_is_reduced(weight_update: str, microbatches: int):
    reduction = {"mean": "mean", "features": "sum", "count": "sum", "none": None}
    step = sgd_step(
        loss_fn,
        0.1,
        4,
        weight="mask",
        has_aux=True,
        aux_reduction=reduction,
        weight_update=weight_update,
        accumulate_steps=microbatches,
    )
    _, metrics = step(step.init(W), BATCH)
    aux = metrics["aux"]
    np.testing.assert_allclose(aux["mean"], ((X @ W) ** 2 * MASK).sum() / 5, rtol=1e-5)
    # The last shard has no weight, and of microbatches of one row that of row 3 has none either.
    counted = X[:6] if microbatches == 1 else X[MASK > 0]
    np.testing.assert_allclose(aux["features"], counted.sum(0), rtol=1e-5, atol=1e-5)
    assert aux["count"] == 5
    assert aux["count"].dtype == jnp.int32
    assert aux["none"] is None


# A sum of floats that something is done to divides as the sum of the batch does.
BOUNDS = {"max": lambda n: jnp.maximum(n, 1), "plus": lambda n: n + 1e-8}
WAYS = [{}, {"accumulate_steps": 2}, deep({"virtual_shards": 4}), deep({"nonfinite": "quarantine"})]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bounded_weight_counts_as_a_plain_one(bound: str, options: dict[str, Any]):
    def loss(w: Any, batch: Any) -> tuple[jax.Array, Any]:
        rows, counts = (batch["x"] @ w) ** 2, batch["mask"]
        mean = (rows * counts).sum() / BOUNDS[bound](counts.sum())
        return mean, {"mean": mean, "features": batch["x"].sum(0)}

    reduction = {"mean": "mean", "features": "sum"}
    given = {"weight": "mask", "has_aux": True, "aux_reduction": reduction, **options}
    step = sgd_step(loss, 0.1, 4, **given)
    _, metrics = step(step.init(W), BATCH)
    aux = metrics["aux"]
    np.testing.assert_allclose(aux["mean"], ((X @ W) ** 2 * MASK).sum() / 5, rtol=1e-5)
    counted = X[MASK > 0] if "accumulate_steps" in options else X[:6]
    np.testing.assert_allclose(aux["features"], counted.sum(0), rtol=1e-5, atol=1e-5)


def unweighted(w: Any, batch: Any) -> tuple[jax.Array, Any]:
    mean = ((batch["x"] @ w) ** 2).mean()
    return mean, (mean, batch["x"].sum(0))


def test_a_mean_of_microbatches_in_16_bits_does_not_overflow():
    loss = lambda w, x: ((w * x).mean(), {"large": jnp.float16(30000)})
    step = make_train_step(
        loss, optax.sgd(0.1), num_shards=2, has_aux=True, aux_reduction="mean", accumulate_steps=4
    )
    _, metrics = step(step.init(jnp.float32(1)), np.ones(16, np.float32))
    assert metrics["aux"]["large"] == 30000


def test_one_word_is_for_all_of_it_and_nothing_more_is_sent():
    step, plain = (
        sgd_step(unweighted, 0.1, 4, has_aux=True, aux_reduction=word) for word in ("mean", None)
    )
    _, metrics = step(step.init(W), BATCH)
    mean, features = metrics["aux"]
    np.testing.assert_allclose(mean, ((X @ W) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(features, X.sum(0) / 4, rtol=1e-5, atol=1e-6)
    _, metrics = plain(plain.init(W), BATCH)
    np.testing.assert_allclose(metrics["aux"][1], X.reshape(4, 2, 3).sum(1), rtol=1e-5, atol=1e-6)
    report = crossshard.inspect(step.lower(step.abstract_init(W), BATCH))
    assert [each.kind for each in report.collectives] == ["all-reduce"]
    # The gradient, the loss and aux, 32 bits each.
    assert report.bytes_sent == pytest.approx(2 * 3 / 4 * 4 * (3 + 1 + 4))


def test_each_group_has_its_own():
    opt = CrossShardOptimizer(optax.sgd(0.1), group_assignment=[[0, 2], [1, 3]])
    step = make_train_step(
        unweighted, opt, num_shards=4, has_aux=True, aux_reduction=("mean", "sum")
    )
    _, metrics = step(step.init(W), BATCH)
    each = ((X @ W) ** 2).reshape(4, 2).mean(1)
    means = [each[[0, 2]].mean(), each[[1, 3]].mean()]
    np.testing.assert_allclose(metrics["aux"][0], means * 2, rtol=1e-5)
    sums = X.reshape(4, 2, 3).sum(1)
    expected = np.stack([sums[[0, 2]].sum(0), sums[[1, 3]].sum(0)] * 2)
    np.testing.assert_allclose(metrics["aux"][1], expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_reduced():
    step_of = lambda reduction, **kwargs: sgd_step(
        loss_fn, 0.1, 2, aux_reduction=reduction, weight="mask", **kwargs
    )
    with pytest.raises(ArgumentError, match=r"has_aux=True"):
        step_of("mean")
    with pytest.raises(ArgumentError, match=r"'per_shard', 'mean' or 'sum'; got 'max'"):
        step_of({"mean": "max"}, has_aux=True)
    step = step_of({"other": "mean"}, has_aux=True)
    with pytest.raises(ArgumentError, match="must begin as aux does"):
        step(step.init(W), BATCH)
    for steps in (1, 2):
        step = step_of("mean", has_aux=True, accumulate_steps=steps)
        with pytest.raises(ArgumentTypeError, match=r"aux\['count'\] is int32.*'sum'"):
            step(step.init(W), BATCH)


def flags(w: Any, batch: Any) -> tuple[jax.Array, Any]:
    return (w * batch).mean(), {"key": jax.random.key(0), "positive": batch[0, 0] > 0}


@pytest.mark.parametrize(
    ("name", "reduction", "steps"), [("key", "mean", 1), ("key", "sum", 2), ("positive", "sum", 1)]
)
def test_keys_and_flags_are_named(name: str, reduction: str, steps: int):
    step = sgd_step(
        flags,
        0.1,
        2,
        has_aux=True,
        accumulate_steps=steps,
        aux_reduction={"key": "per_shard", "positive": "per_shard"} | {name: reduction},
    )
    with pytest.raises(ArgumentTypeError, match=rf"aux\['{name}'\] is .*None for it"):
        step(step.init(np.ones(3, np.float32)), X)
