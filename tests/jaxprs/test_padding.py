"""Rows of zeros leave a loss as it is, or nothing shows that."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from crossshard.jaxprs.padding import counts_nothing, vanishes_with

ROWS = 8
W = {"kernel": jnp.ones((6, 4)), "bias": jnp.ones(4)}
BATCH = {
    "x": jnp.ones((ROWS, 6)),
    "label": jnp.ones(ROWS, int),
    "mask": jnp.ones(ROWS),
    "tokens": jnp.ones((ROWS, 4)),
}
Loss = Callable[[Any, Any], Any]


def logits(w: Any, b: Any) -> Any:
    return b["x"] @ w["kernel"] + w["bias"]


def of_rows(w: Any, b: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, b), b["label"])


def masked(losses: Any, mask: Any) -> Any:
    return (losses * mask).sum() / mask.sum()


def over_time(w: Any, b: Any) -> Any:
    add = lambda total, turn: (total + (turn[0] * turn[1]).sum(), None)
    return lax.scan(add, 0.0, (logits(w, b).T, b["tokens"].T))[0] / b["tokens"].sum()


def one_by_one(x: Any, label: Any, w: Any) -> Any:
    return of_rows(w, {"x": x[None], "label": label[None]})[0]


NOTHING: dict[str, Loss] = {
    "masked": lambda w, b: masked(of_rows(w, b), b["mask"]),
    "chosen": lambda w, b: jnp.where(b["mask"] > 0, of_rows(w, b), 0).sum() / b["mask"].sum(),
    "mean where": lambda w, b: (logits(w, b) ** 2).mean(where=b["tokens"] != 0),
    "labels": lambda w, b: masked(of_rows(w, b), (b["label"] > 0).astype(jnp.bfloat16)),
    "weights that add up to 1": lambda w, b: (of_rows(w, b) * (b["mask"] / b["mask"].sum())).sum(),
    "average": lambda w, b: jnp.average(of_rows(w, b), weights=b["mask"]),
    "dot": lambda w, b: jnp.dot(of_rows(w, b), b["mask"]) / jnp.maximum(b["mask"].sum(), 1),
    "sums that keep their axes": lambda w, b: (
        (logits(w, b) * b["tokens"]).sum(keepdims=True) / b["tokens"].sum(keepdims=True)
    ).squeeze(),
    "guarded": lambda w, b: jnp.where(b["mask"].sum() > 0, masked(of_rows(w, b), b["mask"]), 0),
    "regularised": lambda w, b: masked(of_rows(w, b), b["mask"]) + (w["kernel"] ** 2).sum(),
    "two terms": lambda w, b: (
        masked(of_rows(w, b), b["mask"])
        + masked(jax.nn.logsumexp(logits(w, b), -1) ** 2, b["mask"])
    ),
    "a function of it": lambda w, b: jnp.exp(masked(of_rows(w, b), b["mask"])),
    "vmap": lambda w, b: masked(
        jax.vmap(one_by_one, (0, 0, None))(b["x"], b["label"], w), b["mask"]
    ),
    "checkpoint": lambda w, b: masked(jax.checkpoint(jax.jit(of_rows))(w, b), b["mask"]),
    "over time": over_time,
    "loop over rows": lambda w, b: masked(
        lax.map(lambda x: one_by_one(*x, w), (b["x"], b["label"])), b["mask"]
    ),
    "sums of all shards": lambda w, b: (
        lax.psum((of_rows(w, b) * b["mask"]).sum(), "shards") / lax.psum(b["mask"].sum(), "shards")
    ),
    "means of all shards": lambda w, b: masked(
        (b["x"] - lax.psum((b["x"] * b["mask"][:, None]).sum(0), "shards")).sum(1), b["mask"]
    ),
    "over the mean count": lambda w, b: (
        (of_rows(w, b) * b["mask"]).sum() / lax.pmean(b["mask"].sum(), "shards")
    ),
}
SOMETHING: dict[str, Loss] = {
    "mean": lambda w, b: of_rows(w, b).mean(),
    "a total without the mask": lambda w, b: of_rows(w, b).sum() / b["mask"].sum(),
    "the same, guarded": lambda w, b: jnp.where(
        b["mask"].sum() > 0, of_rows(w, b).sum() / b["mask"].sum(), 0
    ),
    "the same, with its axes": lambda w, b: (
        of_rows(w, b).sum(keepdims=True) / b["mask"].sum(keepdims=True)
    )[0],
    "each column guarded": lambda w, b: (
        jnp.where((logits(w, b) * b["tokens"]).sum(0) > 0, logits(w, b).sum(0), 0).sum()
        / b["tokens"].sum()
    ),
    "the other rows": lambda w, b: masked(of_rows(w, b), 1 - b["mask"]),
    "label 0 counts": lambda w, b: (of_rows(w, b) * (b["label"] >= 0)).sum() / b["mask"].sum(),
    "one of two terms": lambda w, b: masked(of_rows(w, b), b["mask"]) + of_rows(w, b).sum() / ROWS,
    "a function of each column": lambda w, b: jnp.exp((logits(w, b) * b["tokens"]).sum(0)).sum(),
    "batch norm of all shards": lambda w, b: masked(
        of_rows({**w, "bias": -lax.pmean(logits(w, b).mean(0), "shards")}, b), b["mask"]
    ),
    "no mask beside means of all shards": lambda w, b: (
        ((b["x"] - lax.psum((b["x"] * b["mask"][:, None]).sum(0), "shards")) ** 2).sum()
        / lax.psum(b["mask"].sum(), "shards")
    ),
    "batch norm of what is 0 there": lambda w, b: masked(
        (b["x"] - lax.pmean(b["x"].mean(0), "shards")).sum(1), b["mask"]
    ),
    "mean of all shards": lambda w, b: masked(
        of_rows(w, b) * lax.pmean((b["x"] ** 2).mean(), "shards"), b["mask"]
    ),
    "gathered": lambda w, b: masked(
        (logits(w, b) @ lax.all_gather(logits(w, b), "shards", tiled=True).T).sum(1), b["mask"]
    ),
    "carried from row to row": lambda w, b: (
        lax.scan(
            lambda total, row: (total + jnp.exp((row[0] * row[1]).sum()), None),
            0.0,
            (logits(w, b), b["mask"]),
        )[0]
        / b["mask"].sum()
    ),
}


def leaves_it(loss: Loss, zeros: Sequence[str] = tuple(BATCH)) -> bool:
    trace = jax.make_jaxpr(lambda b, w: loss(w, b), axis_env=[("shards", 4)])
    more = jax.tree.map(lambda x: jnp.concatenate([x, x]), BATCH)
    jaxprs = [trace(BATCH, W), trace(more, W)]
    sends = "shards" in str(jaxprs[0])
    return counts_nothing(jaxprs[: 1 + sends], [name in zeros for name in sorted(BATCH)], ROWS)


@pytest.mark.parametrize("name", NOTHING)
def test_rows_of_zeros_count_nothing(name: str):
    assert leaves_it(NOTHING[name])


@pytest.mark.parametrize("name", SOMETHING)
def test_rows_of_zeros_may_count(name: str):
    assert not leaves_it(SOMETHING[name])


def test_copies_of_a_row_count_unless_they_are_masked():
    assert leaves_it(NOTHING["masked"], ["mask"])
    assert leaves_it(NOTHING["chosen"], ["mask"])
    assert not leaves_it(NOTHING["masked"], ["tokens"])
    assert not leaves_it(NOTHING["labels"], ["mask"])


def of_labels(w: Any, b: Any) -> Any:
    counts = b["label"] != -100
    return jnp.where(counts, of_rows(w, b), 0).sum() / jnp.maximum(counts.sum(), 1)


def test_rows_that_another_array_counts_not_leave_it():
    """A label of rows that do not count is any number, and what is made of it is 0 there."""

    def shows(loss: Loss) -> bool:
        jaxpr = jax.make_jaxpr(lambda b, w: loss(w, b))(BATCH, W)
        (total,) = [each for each in jaxpr.eqns if each.primitive.name == "reduce_sum"][-1].outvars
        return vanishes_with(jaxpr, total, len(BATCH), ROWS)

    again = lambda w, b: jnp.where(b["label"] != -100, of_rows(w, b), 0).sum()
    assert shows(of_labels)
    assert shows(lambda w, b: again(w, b) / (b["label"] != -100).sum())
    assert shows(lambda w, b: masked(of_rows(w, b), 1.0 * (b["label"] > 0) + b["tokens"][:, 0]))
    assert not shows(lambda w, b: of_rows(w, b).sum() / (b["label"] != -100).sum())
    # A part of 1 that is cut to 0 multiplies the loss.
    part = lambda b: b["mask"] / 2
    half = lambda w, b, p: (of_rows(w, b) * p).sum() / p.astype(int).sum()
    assert not shows(lambda w, b: half(w, b, part(b)))
