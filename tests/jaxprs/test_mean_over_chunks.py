"""Losses that work on a fixed number of chunks of the rows, as chunked cross entropy does."""

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

ROWS, TIME, WIDTH = 8, 3, 4
W = np.float32(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
SHAPES = {
    "x": ((WIDTH,), jnp.float32),
    "tokens": ((TIME, WIDTH), jnp.float32),
    "y": ((), jnp.int32),
    "mask": ((), jnp.float32),
}
Loss = Callable[[Any, Any, Any], Any]
entropy = optax.softmax_cross_entropy_with_integer_labels


def found(loss: Loss, shards: int = 3) -> Finding:
    batch = {name: jax.ShapeDtypeStruct((ROWS, *x), dtype) for name, (x, dtype) in SHAPES.items()}
    return over_rows(loss, batch, W, own=jax.random.key(0), times=shards)


def cut(x: Any, chunks: int = 4) -> Any:
    return x.reshape(chunks, -1, *x.shape[1:])


def in_chunks(b: Any, w: Any) -> tuple[Any, Any]:
    """The sum of the losses of what counts, and how many count."""

    @jax.checkpoint
    def turn(so_far: Any, chunk: Any) -> Any:
        x, y = chunk
        losses, counts = entropy(x @ w, y), y > 0
        return (so_far[0] + (losses * counts).sum(), so_far[1] + counts.sum()), None

    return lax.scan(turn, (0.0, 0), (cut(b["x"]), cut(b["y"])))[0]


def counted(b: Any, w: Any, k: Any) -> Any:
    turn = lambda at, x: (at + 1, at * (x @ w).sum())
    return lax.scan(turn, 1.0, cut(b["x"]))[1].sum() / len(b["x"])


def one_after_the_other(b: Any, w: Any, k: Any) -> Any:
    turn = lambda h, x: (jnp.tanh(h + x @ w), None)
    return lax.scan(turn, jnp.zeros((len(b["x"]) // 4, WIDTH)), cut(b["x"]))[0].mean()


mapped = lambda b, w: lax.map(lambda x: jnp.tanh(x @ w).sum(1), cut(b["x"]))
sums = lambda b, w: lax.map(lambda x: jnp.tanh(x @ w).sum(), cut(b["x"]))
weights = jnp.arange(4.0)

MEANS: dict[str, Loss] = {
    "scanned": lambda b, w, k: in_chunks(b, w)[0] / len(b["x"]),
}
# What treats chunks unlike, whose rows are others in the whole batch.
UNLIKE: dict[str, Loss] = {
    "counted": counted,
    "one after the other": one_after_the_other,
    "weighted": lambda b, w, k: (sums(b, w) * weights).sum() / len(b["x"]),
    "weighted rows": lambda b, w, k: (mapped(b, w) * weights[:, None]).mean(),
    "weighted in turn": lambda b, w, k: (
        lax.map(lambda both: both[0].sum() * both[1], (cut(b["x"]), weights)).sum() / len(b["x"])
    ),
    "centred": lambda b, w, k: lax.map(lambda x: ((x - x.mean(0)) ** 2).sum(), cut(b["x"])).mean(),
    "ratios": lambda b, w, k: lax.map(
        lambda both: (both[0].sum(1) * both[1]).sum() / both[1].sum(),
        (cut(b["x"]), cut(b["mask"])),
    ).mean(),
    "squares of sums": lambda b, w, k: (sums(b, w) ** 2).mean(),
    "in another order": lambda b, w, k: (cut(b["mask"]).T.reshape(-1) * b["x"][:, 0]).mean(),
    "across": lambda b, w, k: (cut(b["x"]).sum(0) ** 2).mean(),
    "read in turn": lambda b, w, k: (
        lax.map(lambda at: cut(b["x"])[at].sum() * at, jnp.arange(4)).sum() / len(b["x"])
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_in_chunks_is_proven(name: str):
    assert found(MEANS[name]).kind is OverRows.MEAN, found(MEANS[name])
    loss = MEANS[name]
    rng = np.random.default_rng(1)
    batch = {
        name: jnp.asarray(rng.integers(0, 3, (2 * ROWS, *x)), dtype)
        for name, (x, dtype) in SHAPES.items()
    }
    halves = [jax.tree.map(lambda x, at=at: x[at], batch) for at in (slice(8), slice(8, None))]
    mean = sum(loss(half, W, None) for half in halves) / 2
    np.testing.assert_allclose(loss(batch, W, None), mean, rtol=1e-2 if "conv" in name else 1e-5)


def test_a_ratio_in_chunks_is_told_with_what_divides():
    finding = found(lambda b, w, k: in_chunks(b, w)[0] / jnp.maximum(in_chunks(b, w)[1], 1))
    assert finding.kind is OverRows.RATIO
    assert (finding.moved, finding.bound, finding.counts) == ("max", 1, True)


def test_a_count_of_floats_divides_too():
    count = lambda b: lax.scan(lambda s, m: (s + m.sum(), None), 0.0, cut(b["mask"]))[0]
    finding = found(lambda b, w, k: (b["x"] @ w).sum() / count(b))
    assert (finding.kind, finding.counts) == (OverRows.RATIO, False)


@pytest.mark.parametrize("name", UNLIKE)
def test_what_treats_chunks_unlike_is_not_proven(name: str):
    assert found(UNLIKE[name]).kind in (OverRows.UNDECIDED, OverRows.COMPARED)


def test_what_is_assumed_of_an_operation_in_a_chunk_is_told():
    """The callback may let rows meet, which no trace shows."""

    def turn(so_far: Any, x: Any) -> Any:
        own = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return so_far + jax.pure_callback(lambda x: x, own, x).sum(), None

    finding = found(lambda b, w, k: lax.scan(turn, 0.0, cut(b["x"]))[0] / len(b["x"]))
    assert "pure_callback" in str(finding.assumes)
