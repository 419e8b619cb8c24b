"""weight: what a shard counts, of which the loss must know, and steps in which nothing counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, LossError
from tests.step.common import assert_same, sgd_step

RNG = np.random.default_rng(0)
W = RNG.normal(size=(40, 33)).astype(np.float32)
X = RNG.normal(size=(24, 40)).astype(np.float32)


def masked(w: Any, batch: Any) -> jax.Array:
    rows = ((batch["x"] @ w - 1) ** 2).mean(-1)
    return (rows * batch["mask"]).sum() / batch["mask"].sum()


def batch_of(mask: Any) -> Any:
    return {"x": X[: len(mask)], "mask": np.float32(mask)}


# A loss that does not know of the weight.

BLIND = {
    "plain": lambda w, batch: ((batch["x"] @ w) ** 2).mean(),
    "its shape alone": lambda w, batch: ((batch["x"] @ w) ** 2).sum() / batch["mask"].size,
    "in jit, and thrown away": lambda w, batch: jax.jit(
        lambda w, batch: ((batch["x"] @ w) ** 2, batch["mask"])
    )(w, batch)[0].mean(),
    "in aux alone": lambda w, batch: (((batch["x"] @ w) ** 2).mean(), batch["mask"].sum()),
}


@pytest.mark.parametrize("name", BLIND)
def test_a_loss_that_does_not_read_the_weight_is_refused(name: str):
    step = sgd_step(BLIND[name], 0.1, 8, weight="mask", has_aux="aux" in name)
    with pytest.raises(ArgumentError, match=r"the loss does not read it.*weight=lambda batch"):
        step(step.init(W), batch_of(np.ones(17)))


def test_a_function_may_count_what_each_shards_own_loss_does_not_read():
    blind = lambda w, batch: ((batch["x"] @ w) ** 2).mean()
    weight = lambda batch: batch["mask"].sum()
    step = sgd_step(blind, 0.1, 2, weight=weight, loss_over="shard")
    _, metrics = step(step.init(W), batch_of([1, 0, 1, 1]))
    rows = ((X[:4] @ W) ** 2).mean(-1).reshape(2, 2).mean(-1)
    np.testing.assert_allclose(metrics["loss"], (rows[0] + 2 * rows[1]) / 3, rtol=1e-5)
    step = sgd_step(blind, 0.1, 2, weight=weight)
    for _ in range(2):  # what is refused once is refused again
        with pytest.raises(LossError, match="a mean over rows, in which all rows count the same"):
            step(step.init(W), batch_of([1, 0, 1, 1]))


# Rows that do not divide, filled up with others.


def without_the_mask(w: Any, batch: Any) -> jax.Array:
    return ((batch["x"] @ w - 1) ** 2).mean(-1).sum() / batch["mask"].sum()


def with_statistics_of_all(w: Any, batch: Any) -> jax.Array:
    h = batch["x"] @ w
    rows = ((h - jax.lax.pmean(h.mean(0), "shards") - 1) ** 2).mean(-1)
    return (rows * batch["mask"]).sum() / batch["mask"].sum()


def with_statistics_of_its_own(w: Any, batch: Any) -> jax.Array:
    h = batch["x"] @ w
    rows = ((h - h.mean(0) - 1) ** 2).mean(-1)
    return (rows * batch["mask"]).sum() / batch["mask"].sum()


COUNTING = {
    "without the mask": (without_the_mask, {}),
    "with statistics of all": (with_statistics_of_all, {}),
    "each shard's, without the mask": (without_the_mask, {"loss_over": "shard"}),
    "each shard's, with statistics": (with_statistics_of_its_own, {"loss_over": "shard"}),
}


@pytest.mark.parametrize("name", COUNTING)
def test_rows_of_padding_that_may_count_are_refused(name: str):
    loss, options = COUNTING[name]
    step, full = sgd_step(loss, 0.1, 4, weight="mask", **options), batch_of(np.arange(24) % 3)
    few = jax.tree.map(lambda x: x[:22], full)
    for _ in range(2):  # before the step has met the loss, and after
        with pytest.raises(LossError, match=r"padded with rows of zeros.*leave the loss as it is"):
            step(step.init(W), few)
        step(step.init(W), full)


def test_padding_that_counts_for_one_shape_counts_after_another():
    loss = lambda w, b: (masked if b["wide"].shape[1] > 1 else without_the_mask)(w, b)
    of = lambda rows, wide: batch_of(np.ones(rows)) | {"wide": np.ones((rows, wide), np.float32)}
    step = sgd_step(loss, 0.1, 4, weight="mask")
    for _ in range(2):
        with pytest.raises(LossError, match="padded with rows of zeros"):
            step(step.init(W), of(22, 1))
        step(step.init(W), of(24, 2))


@pytest.mark.parametrize("over", ["rows", "shard"])
def test_rows_of_padding_that_do_not_count_are_none(over: str):
    few = batch_of(np.arange(22) % 3)
    step = sgd_step(masked, 0.1, 4, weight="mask", loss_over=over)
    state, _ = step(step.init(W), few)
    expected = W - 0.1 * jax.grad(masked)(W, few)
    np.testing.assert_allclose(step.model(state), expected, atol=1e-6)


def with_a_logarithm(w: Any, batch: Any) -> jax.Array:
    hidden = batch["x"] @ w / jnp.linalg.norm(batch["x"], axis=-1, keepdims=True)
    rows = ((hidden - jnp.log(batch["age"])) ** 2).mean(-1)
    return (jnp.where(batch["mask"] > 0, rows, 0) * batch["mask"]).sum() / batch["mask"].sum()


def with_another_mask(w: Any, batch: Any) -> jax.Array:
    """Copies of a row would count in it, and zeros do not."""
    rows = ((batch["x"] @ w - 1) ** 2).mean(-1)
    return (rows * batch["age"][:, 0]).sum() / batch["mask"].sum()


@pytest.mark.parametrize("loss", [with_a_logarithm, with_another_mask])
def test_rows_of_padding_are_as_finite_as_others(loss: Any):
    few = batch_of(np.arange(22) % 3)
    few |= {"age": np.float32(1 + np.arange(22) % 5)[:, None]}
    step = sgd_step(loss, 0.1, 4, weight="mask", donate=False)
    state = step.init(W)
    assert step.find_nonfinite(state, few) is None
    after, _ = step(state, few)
    assert step.find_nonfinite(state, few) is None
    expected = W - 0.1 * jax.grad(loss)(W, few)
    np.testing.assert_allclose(step.model(after), expected, atol=1e-5)


# Nothing counts.

# Groups, and updates that are elementwise or on every shard, are among the combinations.
WAYS: dict[str, tuple[Any, Any]] = {
    "sharded parameters": ({"params": "sharded"}, optax.adamw(0.1)),
    "leaf by leaf": (
        {"weight_update": "sharded"},
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_weighs_nothing_changes_no_bit(way: str):
    options, inner = WAYS[way]
    opt = CrossShardOptimizer(inner, preprocess=optax.trace(0.5))
    step = make_train_step(masked, opt, num_shards=8, weight="mask", ema=0.9, **options)
    state = step.init(W)
    assert way != "leaf by leaf" or way in step.describe()
    state, metrics = step(state, batch_of(np.ones(24)))
    assert metrics["weight"] == 24
    assert not np.allclose(state.params, W)
    before = jax.tree.map(np.array, state)
    for x in (X, np.full_like(X, np.nan)):
        state, metrics = step(state, {"x": x, "mask": np.zeros(24, np.float32)})
        assert_same(state, before)
        assert metrics["skipped"]
        assert (metrics["weight"], metrics["loss"]) == (0, 0)
    state, metrics = step(state, batch_of(np.ones(24)))
    assert not metrics["skipped"]
    assert int(state.step) == 2


def test_weights_are_as_precise_as_what_is_trained():
    with jax.enable_x64(True):
        weights = np.array([1.0, 1e-9, 3.0, 1 / 3])
        step = sgd_step(
            lambda w, batch: (w * batch["x"] * batch["c"]).sum() / batch["c"].sum(),
            1.0,
            4,
            weight="c",
        )
        x = np.array([1.0, 2.0, 5.0, 7.0])
        state, metrics = step(step.init(np.float64(1)), {"x": x, "c": weights})
        assert metrics["weight"].dtype == np.float64
        expected = (weights * x).sum() / weights.sum()
        np.testing.assert_allclose(1 - state.params, expected, rtol=1e-14)
        np.testing.assert_allclose(metrics["weight"], weights.sum(), rtol=1e-15)


# What shards send each other, whose gradient holds the losses of others.


def normed(w: Any, batch: Any, total: Any) -> jax.Array:
    """A batch norm over what counts, and the mean over it; ``total`` sums over the shards."""
    h, mask = batch["x"] @ w, batch["mask"][:, None]
    mean_of = lambda x: total((x * mask).sum(0)) / total(mask.sum())
    mean = mean_of(h)
    rows = jax.nn.relu((h - mean) / jnp.sqrt(mean_of((h - mean) ** 2) + 1e-5)) ** 3
    return (rows.mean(1) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


def psum(x: Any) -> Any:
    return jax.lax.psum(x, "shards")


BETWEEN = {
    "a batch norm": lambda w, batch: normed(w, batch, psum),
    "a ratio of all": lambda w, batch: (
        psum(masked(w, batch) * batch["mask"].sum()) / psum(batch["mask"].sum())
    ),
    "beside a mean of all": lambda w, batch: (
        masked(w, batch) + jax.lax.pmean(jnp.cos(batch["x"] @ w).mean(), "shards")
    ),
}
OF_ONE = {
    "a batch norm": lambda w, batch: normed(w, batch, lambda x: x),
    "a ratio of all": masked,
    "beside a mean of all": lambda w, batch: masked(w, batch) + jnp.cos(batch["x"] @ w).mean(),
}


@pytest.mark.parametrize("over", ["rows", "shard"])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_shards_send_each_other_counts_by_their_weights(name: str, over: str):
    batch = batch_of(np.arange(24) % 3 < np.arange(24) // 8 + 1)
    step = sgd_step(BETWEEN[name], 0.1, 8, weight="mask", axis_name="shards", loss_over=over)
    state, metrics = step(step.init(W), batch)
    loss, gradient = jax.value_and_grad(OF_ONE[name])(W, batch)
    assert sorted(metrics) == ["loss", "skipped", "weight"]
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(state.params, W - 0.1 * gradient, rtol=1e-5, atol=1e-6)


def test_a_sum_that_all_shards_divide_by_takes_no_weight():
    rows = lambda w, batch: ((batch["x"] @ w) ** 2).mean(1) * batch["mask"]
    loss = lambda w, batch: rows(w, batch).sum() / jax.lax.pmean(batch["mask"].sum(), "shards")
    step = sgd_step(loss, 0.1, 8, weight="mask", axis_name="shards")
    with pytest.raises(LossError, match=r"weight='mask' lets a shard count as .* leave weight out"):
        step(step.init(W), batch_of(np.arange(24) % 3 < np.arange(24) // 8 + 1))


@pytest.mark.parametrize("weight", [-1, np.float32(-1), jnp.float32(-1), jnp.float32(np.nan)])
def test_a_number_that_is_no_weight_is_refused(weight: Any):
    opt = CrossShardOptimizer(optax.sgd(0.1))
    update = lambda g: opt.update(g, opt.init(g), weight=weight)[0]
    with pytest.raises(
        ArgumentError, match=r"A shard's weight (is at least 0; got -1|must be fin)"
    ):
        jax.vmap(update, axis_name="shards")(jnp.ones((2, 3)))


def test_an_error_of_the_loss_says_how_many_rows_it_was_given():
    in_eights = lambda w, batch: ((batch["x"] @ w).reshape(-1, 8, 33) ** 2).mean()
    step = sgd_step(in_eights, 0.1, 4, accumulate_steps=2)
    with pytest.raises(TypeError) as caught:
        step(step.init(W), {"x": X})
    assert any("was given 3 rows" in note for note in caught.value.__notes__)
