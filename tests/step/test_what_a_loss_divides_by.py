"""weight= is what the loss divides by, or it is refused; whatever is done to that sum behind it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard.errors import LossError
from tests.quick import deep, deep_but
from tests.step.common import assert_close, on_one_device, sgd_step, train

RNG = np.random.default_rng(0)
ROWS, RATE = 24, 0.5
W = {"kernel": RNG.normal(size=4).astype(np.float32), "bias": np.float32(0.3)}


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Rows that count more and more, and less than 1 on the first shards."""
    rng, rises = np.random.default_rng(seed), np.linspace(0.05, 0.9, ROWS)[:, None]
    return {
        "x": rng.normal(size=(ROWS, 5, 4)).astype(np.float32),
        "mask": (rng.random((ROWS, 5)) < rises).astype(np.float32),
        "spans": (rng.random((ROWS, 5)) < 0.5).astype(np.float32),
        "words": rng.integers(0, 9, (ROWS, 5)).astype(np.int32),
        "place": np.arange(ROWS, dtype=np.int32),
        "flags": rng.random((ROWS, 5)) < rises,
        "shares": (0.1 * rng.random((ROWS, 5)) * rises).astype(np.float32),
        "long": rng.random((ROWS, 40)) < rises / 2,
    }


decay = lambda p: 0.1 * sum((x**2).sum() for x in jax.tree.leaves(p))
BATCHES = [batch_of(seed) for seed in (1, 2)]
# Batches of which all tokens count tell no mask from another.
FULL = {name: np.ones_like(x) if name == "mask" else x for name, x in BATCHES[0].items()}


def losses(params: Any, batch: Any) -> jax.Array:
    return jnp.tanh(batch["x"] @ params["kernel"] + params["bias"]) ** 2


def divided(of: Callable[[Any], Any], moved: Callable[[Any], Any] = lambda count: count) -> Any:
    return lambda p, b: (losses(p, b) * of(b)).sum() / moved(of(b).sum())


def of_long_rows(params: Any, batch: Any) -> Any:
    tokens = losses(params, batch).mean(1, keepdims=True) * batch["long"]
    return tokens.sum() / jnp.maximum(batch["long"].sum(1), 1).sum()


mask = lambda batch: batch["mask"]
shifted = lambda batch: jnp.pad(batch["mask"][:, 1:], ((0, 0), (1, 0)))
late = lambda batch: batch["mask"] * (batch["place"] > 15)[:, None]
both = lambda batch: batch["mask"] * batch["spans"]
one_for_none = lambda count: jnp.where(count == 0, 1, count)
RIGHT: dict[str, tuple[Any, Any]] = {
    "an entry, at least 5": (divided(mask, lambda n: jnp.maximum(n, 5)), "mask"),
    "an entry and 1": (divided(mask, lambda n: n + 1), "mask"),
    "shares, at least 1": (divided(lambda b: b["shares"], lambda n: jnp.maximum(n, 1)), "shares"),
    "shares and an epsilon": (divided(lambda b: b["shares"], lambda n: n + 1e-3), "shares"),
    "a shifted mask": (divided(shifted), lambda b: b["mask"][:, 1:].sum()),
    "a product, at least 1": (
        divided(both, lambda n: jnp.maximum(n, 1)),
        lambda b: (b["spans"] * b["mask"]).sum(),
    ),
    "words, equal in these batches": (
        divided(lambda b: b["words"] != 0),
        lambda b: (b["words"] > 0).sum(),
    ),
    "where": (lambda p, b: losses(p, b).mean(where=b["flags"]), "flags"),
    "a mean of means": (
        lambda p, b: (losses(p, b) * mask(b)).mean() / jnp.maximum(mask(b).mean(), 0.3),
        lambda b: b["mask"].mean(),
    ),
    "so many times the sum": (
        lambda p, b: (losses(p, b) * mask(b)).mean() / mask(b).mean(),
        "mask",
    ),
    "unmasked above, guarded": (
        lambda p, b: losses(p, b).sum() / one_for_none(late(b).sum()),
        lambda b: late(b).sum(),
    ),
    "none on some shards, guarded, and a regulariser": (
        lambda p, b: 2 * (decay(p) + divided(late, one_for_none)(p, b)),
        lambda b: late(b).sum(),
    ),
    "none on some shards, at least 1, and a regulariser": (
        lambda p, b: divided(late, lambda n: jnp.maximum(n, 1))(p, b) + decay(p),
        lambda b: late(b).sum(),
    ),
    "an integer count, at least 1, and a regulariser": (
        lambda p, b: (
            divided(lambda b: b["words"] != 0, lambda n: jnp.maximum(n, 1))(p, b) + decay(p)
        ),
        lambda b: (b["words"] != 0).sum(),
    ),
}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "3": (3, {}),
    "8, microbatches": (8, {"accumulate_steps": 3}),
    "virtual shards": (2, {"virtual_shards": 8}),
    "sharded": (4, {"params": "sharded"}),
    "quarantine": (4, {"nonfinite": "quarantine"}),
}
EACH = [("3", name) for name in RIGHT] + [("8, microbatches", "a mean of means")]
EACH += [deep(("virtual shards", "a shifted mask")), deep(("sharded", "a shifted mask"))]
EACH += [deep(("quarantine", "a product, at least 1"))]


@pytest.mark.parametrize(("way", "name"), EACH)
def test_the_sum_that_divides_is_taken(way: str, name: str) -> None:
    (loss, weight), (number, options) = RIGHT[name], WAYS[way]
    step = sgd_step(loss, RATE, number, weight=weight, **options)
    state, metrics = step(step.init(W), BATCHES[0])
    first, _ = on_one_device(loss, optax.sgd(RATE), W, BATCHES[:1])
    assert_close(step.model(state), first, atol=2e-6)
    np.testing.assert_allclose(metrics["loss"], loss(W, BATCHES[0]), rtol=1e-4)
    of_batch = (lambda b: b[weight].sum()) if isinstance(weight, str) else weight
    # The weights of parts are added, and a mean is that of a part.
    parts = number * options.get("accumulate_steps", 1)
    times = options.get("virtual_shards", parts) if name == "a mean of means" else 1
    np.testing.assert_allclose(metrics["weight"], times * of_batch(BATCHES[0]), rtol=1e-5)
    want, _ = on_one_device(loss, optax.sgd(RATE), W, BATCHES)
    assert_close(step.model(train(step, state, BATCHES[1:])), want, atol=4e-6)


@pytest.mark.parametrize("way", deep_but(["8, microbatches"], WAYS))
@pytest.mark.parametrize(
    "moved",
    [lambda n: jnp.maximum(n, 1), one_for_none, lambda n: n + 1e-8],
    ids=["at least 1", "guarded", "an epsilon"],
)
def test_where_nothing_counts_the_sum_above_does(way: str, moved: Callable[[Any], Any]) -> None:
    # As in the focal loss over anchors, where most images have no object.
    objects = np.where(np.arange(ROWS)[:, None] < 5, BATCHES[0]["words"] % 2, 0)
    batch, (number, options) = {**BATCHES[0], "objects": objects}, WAYS[way]
    loss = lambda p, b: losses(p, b).sum() / moved(b["objects"].sum())
    step = sgd_step(loss, RATE, number, weight="objects", **options)
    state, metrics = step(step.init(W), batch)
    want, _ = on_one_device(loss, optax.sgd(RATE), W, [batch])
    assert_close(step.model(state), want, atol=2e-6)
    np.testing.assert_allclose(metrics["loss"], loss(W, batch), rtol=1e-5)


WRONG: dict[str, tuple[Any, Any]] = {
    "the mask of a shifted one": (divided(shifted), "mask"),
    "a column more": (divided(shifted), lambda b: b["mask"].sum()),
    "tokens of a plain mean": (lambda p, b: losses(p, b).mean(), lambda b: b["mask"].sum()),
    # A shard whose sum is below the bound would add more of it than its part.
    "at least 1, and a regulariser": (
        lambda p, b: divided(lambda b: b["shares"], lambda n: jnp.maximum(n, 1))(p, b) + decay(p),
        "shares",
    ),
    "at least 5, and a regulariser": (
        lambda p, b: divided(mask, lambda n: jnp.maximum(n, 5))(p, b) + decay(p),
        "mask",
    ),
    # They differ where no token of a row counts, and where a weight is above 5.
    "rows of at least 1": (of_long_rows, "long"),
    "up to 5": (
        lambda p, b: (losses(p, b) * b["words"]).sum() / jnp.minimum(b["words"], 5).sum(),
        "words",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_sum_is_refused_with_what_to_write(name: str) -> None:
    loss, weight = WRONG[name]
    step = sgd_step(loss, RATE, 2, weight=weight)
    with pytest.raises(LossError, match=r"crossshard\.Mean\(total, count\)|Divide by that"):
        step(step.init(W), BATCHES[0])


def test_the_message_has_both_expressions_their_lines_and_numbers() -> None:
    def loss(params: Any, batch: Any) -> Any:
        tokens = batch["mask"][:, 1:]
        return (losses(params, batch)[:, 1:] * tokens).sum() / tokens.sum()

    step = sgd_step(loss, RATE, 2, weight="mask")
    with pytest.raises(LossError) as caught:
        step(step.init(W), BATCHES[0])
    text = str(caught.value)
    assert "return (losses(params, batch)[:, 1:] * tokens).sum() / tokens.sum()" in text
    assert "test_what_a_loss_divides_by.py:" in text
    assert "the weight: 'mask', which is batch['mask'].sum()" in text
    half = BATCHES[0]["mask"][: ROWS // 2]
    assert f"divides by {half[:, 1:].sum():.7g}, and weight= is {half.sum():.7g}" in text


def test_what_is_equal_in_the_first_batch_alone_is_not_believed_later() -> None:
    """Where all tokens count, another mask of as many is equal; then what divides is taken."""
    loss = divided(mask)
    weight = lambda batch: jnp.where(batch["mask"] > -1, 1.0, 0.0).sum()
    step = sgd_step(loss, RATE, 4, weight=weight)
    got = step.model(train(step, step.init(W), [FULL, BATCHES[1]]))
    want, _ = on_one_device(loss, optax.sgd(RATE), W, [FULL, BATCHES[1]])
    assert_close(got, want, atol=4e-6)


@pytest.mark.parametrize("label", [-100, 50256])
def test_a_label_that_does_not_count_may_come_after_the_first_batch(label: int) -> None:
    loss = divided(lambda batch: batch["words"] != label)
    later = BATCHES[1] | {"words": np.where(BATCHES[1]["mask"] > 0, 1, label).astype(np.int32)}
    step = sgd_step(loss, RATE, 4, weight=lambda batch: jnp.float32(batch["words"].size))
    got = step.model(train(step, step.init(W), [BATCHES[0], later]))
    want, _ = on_one_device(loss, optax.sgd(RATE), W, [BATCHES[0], later])
    assert_close(got, want, atol=4e-6)


def test_rows_that_count_nothing_may_come_after_the_first_batch() -> None:
    batches = [BATCHES[1] | {"long": np.ones((ROWS, 40), bool)}, BATCHES[0]]
    assert not batches[1]["long"].any(1).all()
    step = sgd_step(of_long_rows, RATE, 4, weight="long")
    got = step.model(train(step, step.init(W), batches))
    want, _ = on_one_device(of_long_rows, optax.sgd(RATE), W, batches)
    assert_close(got, want, atol=4e-6)


@pytest.mark.parametrize("bound", [1, 5])
def test_a_shard_may_have_one_row(bound: float) -> None:
    """With one row JAX leaves out operations, so that the program of more rows is analysed."""

    def loss(params: Any, batch: Any) -> Any:
        logits, labels = batch["x"] * params["kernel"] + params["bias"], batch["words"] % 4
        found = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (found * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), bound)

    few = [{name: x[::3] for name, x in batch.items()} for batch in BATCHES]
    step = sgd_step(loss, RATE, len(few[0]["mask"]), weight="mask")
    want, _ = on_one_device(loss, optax.sgd(RATE), W, few)
    assert_close(step.model(train(step, step.init(W), few)), want, atol=4e-6)


def test_a_step_that_is_lowered_has_no_numbers() -> None:
    loss, weight = RIGHT["words, equal in these batches"]
    step = sgd_step(loss, RATE, 4, weight=weight)
    with pytest.raises(LossError, match="The first call of the step checks it by numbers"):
        step.lower(step.init(W), BATCHES[0])
    for name in ("a shifted mask", "shares, at least 1", "so many times the sum"):
        loss, weight = RIGHT[name]
        step = sgd_step(loss, RATE, 4, weight=weight)
        step.lower(step.init(W), BATCHES[0])


def test_a_fraction_of_a_bound_beside_a_regulariser_makes_a_step_that_was_lowered_not_finite():
    loss = lambda p, b: divided(mask, lambda n: jnp.maximum(n, 1))(p, b) + decay(p)
    some = BATCHES[0]
    few = {**some, "mask": 0.01 * some["mask"]}
    step = sgd_step(loss, RATE, 2, weight="mask")
    step.lower(step.init(W), some)
    after, _ = jax.jit(step)(step.init(W), some)
    assert_close(after.params, on_one_device(loss, optax.sgd(RATE), W, [some])[0])
    after, metrics = jax.jit(step)(step.init(W), few)
    assert not np.isfinite(metrics["loss"])
