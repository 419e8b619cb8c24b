"""Losses that name the shard axis: a sum over the shards excuses nothing else that is wrong."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from crossshard.jaxprs.mean_over_rows import Finding
from crossshard.jaxprs.row_facts import OverRows
from tests.jaxprs.proving import over_rows

ROWS, WIDTH, SHARDS = 6, 4, 4
W = np.float32(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    "mask": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
}
Loss = Callable[[Any, Any], Any]


def found(loss: Loss, microbatches: int = 1) -> Finding:
    """What is found of a loss in a ``shard_map`` over shards and parts of the model."""
    of: list[Finding] = []

    def look(x: Any) -> Any:
        function = lambda batch, w, own: loss(batch, w)
        times = SHARDS * microbatches
        of.append(over_rows(function, BATCH, W, times=times, shards=("shards",)))
        return x

    mesh = jax.sharding.AbstractMesh(
        (SHARDS, 2), ("shards", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    spec = jax.P("shards")
    run = jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jax.eval_shape(run, jax.ShapeDtypeStruct((SHARDS,), jnp.float32))
    return of[0]


def normed(x: Any) -> Any:
    mean, of_squares = lax.pmean((x.mean(0), (x**2).mean(0)), "shards")
    return (x - mean) * lax.rsqrt(of_squares - mean**2 + 1e-5)


def contrastive(x: Any, w: Any) -> Any:
    scores = (x @ w) @ (x @ w.T).T
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(x))).mean()


def gathered(x: Any, w: Any) -> Any:
    everyone = lax.all_gather(x @ w.T, "shards", tiled=True)
    rows = lax.axis_index("shards") * len(x) + jnp.arange(len(x))
    scores = jax.nn.log_softmax(x @ w @ everyone.T)
    return -jnp.take_along_axis(scores, rows[:, None], 1).mean()


def in_a_ring(x: Any, w: Any) -> Any:
    other, signs, total = x @ w, 2 * jnp.eye(len(x)) - 1, jnp.float32(0)
    for _ in range(SHARDS):
        total -= jax.nn.log_sigmoid(signs * (x @ other.T)).sum()
        other = lax.ppermute(other, "shards", [(i, (i + 1) % SHARDS) for i in range(SHARDS)])
        signs = -jnp.ones_like(signs)
    return total / len(x)


def token_mean(x: Any, mask: Any) -> Any:
    return (x.sum(1) * mask).sum() / mask.sum()


BY_ITSELF: dict[str, Loss] = {
    "batch norm": lambda b, w: (normed(b["x"] @ w) ** 3).mean(),
    "gathered": lambda b, w: gathered(b["x"], w),
    "in a ring": lambda b, w: in_a_ring(b["x"], w),
    "mean of what compares": lambda b, w: lax.pmean((b["x"] @ w).std(), "shards"),
    "ratio of sums": lambda b, w: (
        lax.psum((b["x"] @ w).sum(), "shards") / lax.psum(b["mask"].sum(), "shards")
    ),
    "not understood": lambda b, w: jnp.sort(normed(b["x"] @ w), axis=0)[0].sum(),
    "sum over the model": lambda b, w: lax.psum(jnp.tanh(b["x"] @ w), "model").mean(),
}
WRONG: dict[str, tuple[Loss, OverRows]] = {
    "beside a comparison": (
        lambda b, w: (normed(b["x"] @ w) ** 3).mean() + contrastive(b["x"], w),
        OverRows.COMPARED,
    ),
    "beside a token mean": (
        lambda b, w: token_mean(normed(b["x"] @ w), b["mask"]),
        OverRows.RATIO,
    ),
    "sum": (lambda b, w: (normed(b["x"] @ w) ** 3).sum(), OverRows.SUM),
    "mean of token means": (
        lambda b, w: lax.pmean(token_mean(b["x"] @ w, b["mask"]), "shards"),
        OverRows.COMPARED,
    ),
    "a comparison on a part of the model": (
        lambda b, w: contrastive(lax.psum(jnp.tanh(b["x"] @ w), "model"), w),
        OverRows.COMPARED,
    ),
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_what_sums_over_the_shards_by_itself_runs(name: str):
    assert found(BY_ITSELF[name]).kind is OverRows.OVER_SHARDS


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_beside_such_a_sum_is_told(name: str):
    loss, kind = WRONG[name]
    assert found(loss).kind is kind


def psum(x: Any) -> Any:
    return lax.psum(x, "shards")


def losses(b: Any, w: Any) -> Any:
    return jnp.tanh(b["x"] @ w)


# What is summed over the shards: as many times too large as there are shards, or too small.
TOO_LARGE: dict[str, Loss] = {
    "means": lambda b, w: psum(losses(b, w).mean()),
    "means and parameters": lambda b, w: 2 * psum(losses(b, w).mean() + (w**2).sum()),
    "a sum over the rows of one": lambda b, w: psum(losses(b, w).sum()) / len(b["x"]),
    # The number of shards is that of the columns, too.
    "a sum over the elements of one": lambda b, w: psum(losses(b, w).sum()) / losses(b, w).size,
    "a ratio times their number": lambda b, w: (
        psum(losses(b, w).sum()) / psum(b["mask"].sum()) * lax.axis_size("shards")
    ),
}
TOO_SMALL: dict[str, Loss] = {
    "its own over all": lambda b, w: losses(b, w).sum() / psum(b["mask"].sum()),
    "beside what is right": lambda b, w: (
        lax.pmean(losses(b, w).mean(), "shards") * losses(b, w).sum() / psum(len(b["x"]))
    ),
}
RIGHT: dict[str, Loss] = {
    "mean": lambda b, w: lax.pmean(losses(b, w).mean(), "shards"),
    "means over their number": lambda b, w: psum(losses(b, w).mean()) / lax.axis_size("shards"),
    "means over a literal": lambda b, w: psum(losses(b, w).mean()) / SHARDS,
    "means times a literal": lambda b, w: psum(losses(b, w).mean()) * (1 / SHARDS),
    "sums over counts": lambda b, w: psum(losses(b, w).sum()) / psum((b["x"] > 0).sum()),
    "its own over the mean": lambda b, w: losses(b, w).sum() / lax.pmean(b["mask"].sum(), "shards"),
    "its own, times their number": lambda b, w: (
        lax.axis_size("shards") * losses(b, w).sum() / psum(b["mask"].sum())
    ),
    "over all elements": lambda b, w: (
        psum(losses(b, w).sum()) / (losses(b, w).size * lax.axis_size("shards"))
    ),
    "logarithm of a mean": lambda b, w: jnp.log(psum(losses(b, w).sum()) / psum(len(b["x"]))),
}
# The numbers of rows and shards in a loss are those of one shard with all rows, to the proof.
PARTS: dict[str, Loss] = {
    "over all rows": lambda b, w: losses(b, w).sum() / psum(len(b["x"])),
    "over rows and shards": lambda b, w: (
        losses(b, w).sum() / (len(b["x"]) * lax.axis_size("shards"))
    ),
    "a mean over shards": lambda b, w: losses(b, w).mean() / lax.axis_size("shards"),
}


def test_what_was_not_summed_over_the_shards_is_divided_by_a_number_as_ever():
    decay = lambda b, w: (w**2).sum() / len(b["x"]) / SHARDS
    loss = lambda b, w: lax.pmean(losses(b, w).mean(), "shards") + decay(b, w)
    assert found(loss).kind is OverRows.UNDECIDED


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_all_shards_add_up_once_more_is_told(name: str):
    assert found(TOO_LARGE[name]).reason == "the shards' means are added up"


@pytest.mark.parametrize("name", TOO_SMALL)
def test_what_is_a_part_of_the_shards_is_told(name: str):
    of = found(TOO_SMALL[name])
    assert of.kind is OverRows.SUM
    assert of.reason.startswith("a shard's part")


@pytest.mark.parametrize("name", RIGHT)
def test_a_sum_over_the_shards_that_all_divide_is_right(name: str):
    assert found(RIGHT[name]).kind is OverRows.OVER_SHARDS


@pytest.mark.parametrize("name", PARTS)
def test_the_number_of_shards_is_one_for_all_rows(name: str):
    assert found(PARTS[name]).kind is OverRows.SUM


# With two microbatches, which do not see each other's rows.
OF_MICROBATCHES: dict[str, tuple[Loss, OverRows]] = {
    "mean": (RIGHT["mean"], OverRows.OVER_SHARDS),
    "over all elements": (RIGHT["over all elements"], OverRows.OVER_SHARDS),
    "sums over counts": (RIGHT["sums over counts"], OverRows.RATIO),
    "logarithm of a mean": (RIGHT["logarithm of a mean"], OverRows.COMPARED),
    "batch norm": (BY_ITSELF["batch norm"], OverRows.COMPARED),
    "a sum": (lambda b, w: psum(losses(b, w).sum()), OverRows.COMPARED),
    "a shard's part": (PARTS["over rows and shards"], OverRows.SUM),
    # Nothing is known of the bound beside the mean over shards; it is a ratio all the same.
    "its own over a bounded mean": (
        lambda b, w: losses(b, w).sum() / jnp.maximum(lax.pmean(b["mask"].sum(), "shards"), 1),
        OverRows.RATIO,
    ),
}


@pytest.mark.parametrize("name", OF_MICROBATCHES)
def test_a_sum_over_the_shards_has_the_rows_of_one_microbatch(name: str):
    loss, kind = OF_MICROBATCHES[name]
    assert found(loss, microbatches=2).kind is kind


# Over shards along the axes "a" and "b", of which some sums are over one alone.
OF_TWO_AXES: dict[str, tuple[Loss, OverRows]] = {
    "mean over one": (lambda b, w: lax.pmean(losses(b, w).mean(), "a"), OverRows.OVER_SHARDS),
    "means of one added up": (lambda b, w: lax.psum(losses(b, w).mean(), "a"), OverRows.COMPARED),
    "means of one over their number": (
        lambda b, w: lax.psum(losses(b, w).mean(), "a") / 4,
        OverRows.OVER_SHARDS,
    ),
    "one after the other": (
        lambda b, w: (
            lax.psum(lax.psum(losses(b, w).sum(), "a"), "b")
            / lax.psum(lax.psum(b["mask"].sum(), "a"), "b")
        ),
        OverRows.OVER_SHARDS,
    ),
    "its own over the mean of one": (
        lambda b, w: losses(b, w).sum() / lax.pmean(b["mask"].sum(), "a"),
        OverRows.RATIO,
    ),
    "of one over that of both": (
        lambda b, w: lax.psum(losses(b, w).sum(), "a") / lax.psum(b["mask"].sum(), ("a", "b")),
        OverRows.COMPARED,
    ),
    "moments of both": (
        lambda b, w: (
            (losses(b, w) - lax.pmean(lax.pmean(losses(b, w).mean(0), "a"), "b")) ** 2
        ).mean(),
        OverRows.OVER_SHARDS,
    ),
    "moments of one": (
        lambda b, w: ((losses(b, w) - lax.pmean(losses(b, w).mean(0), "a")) ** 2).mean(),
        OverRows.COMPARED,
    ),
}


@pytest.mark.parametrize("name", OF_TWO_AXES)
def test_shards_along_two_axes_are_joined_one_after_the_other(name: str):
    loss, kind = OF_TWO_AXES[name]
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((SHARDS, 2), ("a", "b"), axis_types=auto)
    spec = jax.P(("a", "b"))
    of: list[Finding] = []

    def look(x: Any) -> Any:
        function = lambda batch, w, own: loss(batch, w)
        of.append(over_rows(function, BATCH, W, times=2 * SHARDS, shards=("a", "b")))
        return x

    run = jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jax.eval_shape(run, jax.ShapeDtypeStruct((2 * SHARDS,), jnp.float32))
    assert of[0].kind is kind
