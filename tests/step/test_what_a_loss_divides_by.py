"""weight= is what the loss divides by, or it is refused; whatever is done to that sum behind it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard.errors import LossError
from tests.quick import deep
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


def over_time(params: Any, batch: Any, moved: Callable[[Any], Any]) -> Any:
    """Add up losses and tokens chunk by chunk, as a chunked cross entropy does."""

    def chunk(sums: Any, given: Any) -> tuple[Any, None]:
        each, counts = given
        return (sums[0] + (each * counts).sum(), sums[1] + counts.sum()), None

    given = losses(params, batch).T, late(batch).T
    (total, count), _ = jax.lax.scan(chunk, (0.0, 0.0), given)
    return total / moved(count)


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
    "an entry less a half": (divided(mask, lambda n: n - 0.5), "mask"),
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
    "carried by a scan over time, at least 1": (
        lambda p, b: over_time(p, b, lambda n: jnp.maximum(n, 1)),
        lambda b: late(b).sum(),
    ),
    "carried by a scan over time, guarded": (
        lambda p, b: over_time(p, b, one_for_none) + decay(p),
        lambda b: late(b).sum(),
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


@jax.jit
def guarded(total: Any, count: Any) -> Any:
    return jnp.where(count > 0, total / jnp.maximum(count, 1), 0)


OBJECTS = {
    **BATCHES[0],
    "objects": np.where(np.arange(ROWS)[:, None] < 5, BATCHES[0]["words"] % 2, 0),
}
QUOTIENTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "bare": lambda total, n, _: total / n,
    "at least 1": lambda total, n, _: total / jnp.maximum(n, 1),
    "guarded below": lambda total, n, _: total / one_for_none(n),
    "an epsilon": lambda total, n, _: total / (n + 1e-8),
    "guarded": lambda total, n, _: jnp.where(n > 0, total / n, 0),
    "guarded the other way": lambda total, n, _: -jnp.where(n == 0, 0.0, -total / n) / 2,
    "guarded twice": lambda total, n, _: guarded(total, n),
    "an inverse": lambda total, n, _: total * jnp.where(n > 0, 1 / n, 0),
    "a regulariser": lambda total, n, other: guarded(total, n) + other,
    "a helper that is called twice": lambda total, n, other: (
        guarded(total, n) + 2 * guarded(3 * total, n) + other
    ),
    "a part without slope": lambda total, n, other: (
        guarded(total, n) + jax.lax.stop_gradient(guarded(3 * total, n)) + other
    ),
    "a regulariser, bare": lambda total, n, other: other + total / n,
    "two quotients": lambda total, n, other: (
        jnp.where(n > 0, total / n, 0) + jnp.where(n > 0, 2 * total / n, 0) + other
    ),
    "in a checkpoint": lambda total, n, other: jax.checkpoint(guarded)(total, n) + other,
    "at least 5": lambda total, n, other: total / jnp.maximum(n, 5) + other,
    "and 1": lambda total, n, other: total / (n + 1) + other,
}
EACH = [("8, microbatches", name) for name in QUOTIENTS]
EACH += [deep((way, "a regulariser")) for way in WAYS if way != "8, microbatches"]


@pytest.mark.parametrize(("way", "name"), EACH)
def test_where_nothing_counts_the_sum_above_does(way: str, name: str) -> None:
    # As in the focal loss over anchors, where most images have no object.
    number, options = WAYS[way]
    loss = lambda p, b: QUOTIENTS[name](losses(p, b).sum(), b["objects"].sum(), decay(p))
    step = sgd_step(loss, RATE, number, weight="objects", **options)
    state, metrics = step(step.init(W), OBJECTS)
    want, _ = on_one_device(loss, optax.sgd(RATE), W, [OBJECTS])
    assert_close(step.model(state), want, atol=2e-6, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], loss(W, OBJECTS), rtol=1e-5)


@pytest.mark.parametrize("aux", ["none", "mean"])
def test_what_is_returned_beside_a_split_loss_stays(aux: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        found = guarded(losses(params, batch).sum(), batch["objects"].sum())
        beside = {"loss": found, "mean": guarded(losses(params, batch).sum(), batch["mask"].sum())}
        return found + decay(params), beside

    options = {"has_aux": True} | ({} if aux == "none" else {"aux_reduction": aux})
    step = sgd_step(loss, RATE, 4, weight="objects", **options)
    _, metrics = step(step.init(W), OBJECTS)
    pieces = [{k: x[6 * i : 6 * i + 6] for k, x in OBJECTS.items()} for i in range(4)]
    found = [loss(W, piece)[1] for piece in pieces]
    if aux == "mean":
        counts = [piece["objects"].sum() for piece in pieces]
        found = jax.tree.map(lambda *x: np.average(x, weights=counts), *found)
    else:
        found = jax.tree.map(lambda *x: np.stack(x), *found)
    assert_close(metrics["aux"], found, atol=1e-5)


@pytest.mark.parametrize("of", ["shares", "mask"])
def test_a_fraction_of_a_bound_may_be_beside_a_regulariser(of: str) -> None:
    loss = lambda p, b: divided(lambda b: b[of], lambda n: jnp.maximum(n, 5))(p, b) + decay(p)
    step = sgd_step(loss, RATE, 4, weight=of)
    got = step.model(train(step, step.init(W), BATCHES))
    assert_close(got, on_one_device(loss, optax.sgd(RATE), W, BATCHES)[0], atol=4e-6)


WRONG: dict[str, tuple[Any, Any]] = {
    "the mask of a shifted one": (divided(shifted), "mask"),
    "a column more": (divided(shifted), lambda b: b["mask"].sum()),
    "tokens of a plain mean": (lambda p, b: losses(p, b).mean(), lambda b: b["mask"].sum()),
    # A branch that may drop what is above.
    "a branch": (
        lambda p, b: jax.lax.cond(
            (n := b["mask"].sum()) > 0, lambda: losses(p, b).sum() / n, lambda: 0.0
        ),
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


def of_sorted_rows(moved: Callable[[Any], Any]) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        found = losses(params, batch)
        order = jnp.argsort(found[:, 0])
        found = found[order][jnp.argsort(order)]
        return (found * batch["mask"]).sum() / moved(batch["mask"])

    return loss


def test_numbers_do_not_show_that_a_weight_is_what_divides() -> None:
    """The sort is decided by numbers, and a mask of 0 and 1 has as many as it adds up to."""
    of_sum = of_sorted_rows(lambda mask: jnp.maximum(mask.sum(), 1))
    step = sgd_step(of_sum, RATE, 4, weight="mask")
    got = step.model(train(step, step.init(W), BATCHES))
    assert_close(got, on_one_device(of_sum, optax.sgd(RATE), W, BATCHES)[0], atol=4e-6)
    of_number = of_sorted_rows(lambda mask: jnp.maximum((mask > 0).sum(), 1))
    step = sgd_step(of_number, RATE, 4, weight="mask")
    with pytest.raises(LossError, match="divides by one sum over rows, and weight= is another"):
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


@pytest.mark.parametrize("label", [-100, deep(50256)])
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


def test_a_shard_may_have_one_row_whose_labels_count() -> None:
    """Only the program of more rows has the sum that divides, and the weight is that sum."""
    counts = lambda batch: batch["words"] > 4
    weight = lambda batch: counts(batch).sum()

    def loss(bound: float) -> Any:
        def of_labels(params: Any, batch: Any) -> Any:
            logits, labels = batch["x"] * params["kernel"] + params["bias"], batch["words"] % 4
            found = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.where(counts(batch), found, 0).sum() / jnp.maximum(
                counts(batch).sum(), bound
            ) + decay(params)

        return of_labels

    few = [{name: x[::3] for name, x in batch.items()} for batch in BATCHES]
    step = sgd_step(loss(1), RATE, len(few[0]["mask"]), weight=weight)
    want, _ = on_one_device(loss(1), optax.sgd(RATE), W, few)
    assert_close(step.model(train(step, step.init(W), few)), want, atol=4e-6)
    step = sgd_step(loss(5), RATE, len(few[0]["mask"]), weight=weight)
    with pytest.raises(LossError, match="another program for so few rows"):
        step(step.init(W), few[0])


def test_a_step_that_is_lowered_has_no_numbers() -> None:
    loss, weight = RIGHT["words, equal in these batches"]
    step = sgd_step(loss, RATE, 4, weight=weight)
    with pytest.raises(LossError, match="The first call of the step checks it by numbers"):
        step.lower(step.init(W), BATCHES[0])
    for name in ("a shifted mask", "shares, at least 1", "so many times the sum"):
        loss, weight = RIGHT[name]
        step = sgd_step(loss, RATE, 4, weight=weight)
        step.lower(step.init(W), BATCHES[0])
