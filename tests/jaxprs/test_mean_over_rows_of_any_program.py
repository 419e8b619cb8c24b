"""Random programs whose axes coincide in length: what is proven of them is so, by numbers.

Their rows are few or many, they may ask Python how many, draw noise, and sum over the shards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from crossshard.jaxprs.mean_over_rows import found
from crossshard.jaxprs.row_facts import OverRows
from tests.jaxprs.proving import proof_of
from tests.jaxprs.test_row_draws import DISTRIBUTIONS

# The length of every axis but that of the rows.
ROWS = 4


@jax.custom_vjp
def bounded(x: Any) -> Any:
    return x


bounded.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@jax.custom_vjp
def centred(x: Any) -> Any:
    return x


centred.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))


@jax.custom_vjp
def reversed_gradient(x: Any) -> Any:
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))


def merged(x: Any, axis: int) -> Any:
    axis %= x.ndim - 1
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def contracted(x: Any, y: Any, i: int, j: int) -> Any:
    return jnp.tensordot(x, y, ((i % x.ndim,), (j % y.ndim,)))


def batched(x: Any, y: Any, i: int, j: int) -> Any:
    return lax.dot_general(x, y, (((i % x.ndim,), (j % y.ndim,)), ((0,), (0,))))


def scanned(x: Any, w: Any, i: int) -> Any:
    x = jnp.moveaxis(x, i % x.ndim, 0)
    step = lambda h, x: (jnp.tanh(0.5 * h + x),) * 2
    return lax.scan(step, jnp.zeros(x.shape[1:]), x)[i % 2]


def looped(x: Any, i: int) -> Any:
    return lax.fori_loop(0, 2 + i, lambda n, h: 0.5 * h + jnp.sin(x) * n, jnp.zeros_like(x))


def axis_of(x: Any, i: int) -> int:
    return i % x.ndim


def flags(x: Any, i: int) -> Any:
    return (jnp.abs(x) * 7).astype(jnp.int32) % (i + 2)


DRAWS = list(DISTRIBUTIONS.values())
SHARED = jax.random.key(7)


def drawn(x: Any, key: Any, i: int, j: int) -> Any:
    """Noise of one of the distributions, of parameters of this shape."""
    return DRAWS[(8 * i + j) % len(DRAWS)](key, 1 + jnp.abs(x)).astype(jnp.float32)


def drawn_of_rows(keys: Any, i: int, j: int) -> Any:
    return jax.vmap(lambda key: drawn(jnp.ones(ROWS), key, i, j))(keys)


def of_numbers(keys: Any) -> Any:
    """Noise of a shared key and each row's number."""
    fold = lambda i: jax.random.normal(jax.random.fold_in(SHARED, i), (ROWS,))
    return jax.vmap(fold)(jnp.arange(len(keys)))


def guarded(x: Any) -> Any:
    return jnp.where(x == 0, 1.0, x)


# Of the batch's rows, two values and two numbers.
Operation = Callable[[int, Any, Any, int, int], Any]
OPERATIONS: list[Operation] = [
    lambda r, x, y, i, j: jnp.tanh(x),
    lambda r, x, y, i, j: x * y,
    lambda r, x, y, i, j: x + y,
    lambda r, x, y, i, j: x - y,
    lambda r, x, y, i, j: x @ y,
    lambda r, x, y, i, j: jnp.maximum(x, y),
    lambda r, x, y, i, j: jnp.where(x > 0, x, y),
    lambda r, x, y, i, j: jnp.where(x > 0, y, 0.0),
    lambda r, x, y, i, j: jnp.abs(x),
    lambda r, x, y, i, j: -x,
    lambda r, x, y, i, j: x / (1.5 + i),
    lambda r, x, y, i, j: x / r,
    lambda r, x, y, i, j: x * r,
    lambda r, x, y, i, j: x / x.size,
    lambda r, x, y, i, j: x / (1 + jnp.abs(y)),
    lambda r, x, y, i, j: x / (jnp.abs(y).sum() + 1e-6),
    lambda r, x, y, i, j: x + (0.5 * i),
    lambda r, x, y, i, j: x.sum(axis_of(x, i)),
    lambda r, x, y, i, j: x.mean(axis_of(x, i)),
    lambda r, x, y, i, j: x.mean(axis_of(x, i), keepdims=True),
    lambda r, x, y, i, j: x.max(axis_of(x, i)),
    lambda r, x, y, i, j: jnp.cumsum(x, axis_of(x, i)),
    lambda r, x, y, i, j: jnp.sort(x, axis_of(x, i)),
    lambda r, x, y, i, j: jax.nn.softmax(x, axis_of(x, i)),
    lambda r, x, y, i, j: jnp.swapaxes(x, axis_of(x, i), axis_of(x, j)),
    lambda r, x, y, i, j: jnp.moveaxis(x, axis_of(x, i), axis_of(x, j)),
    lambda r, x, y, i, j: merged(x, i),
    lambda r, x, y, i, j: x.reshape(-1),
    lambda r, x, y, i, j: x.reshape(ROWS, -1),
    lambda r, x, y, i, j: x.reshape(-1, ROWS),
    lambda r, x, y, i, j: x.reshape(r, -1),
    lambda r, x, y, i, j: x.reshape(-1, r),
    lambda r, x, y, i, j: x.reshape(ROWS, r, -1),
    lambda r, x, y, i, j: jnp.flip(x, axis_of(x, i)),
    lambda r, x, y, i, j: jnp.roll(x, 1, axis_of(x, i)),
    lambda r, x, y, i, j: lax.slice_in_dim(x, 0, x.shape[axis_of(x, i)] // 2, axis=axis_of(x, i)),
    lambda r, x, y, i, j: lax.index_in_dim(x, j, axis_of(x, i), keepdims=False),
    lambda r, x, y, i, j: jnp.expand_dims(x, i % (x.ndim + 1)),
    lambda r, x, y, i, j: jnp.broadcast_to(x, (r, *x.shape)),
    lambda r, x, y, i, j: jnp.broadcast_to(x, (ROWS, *x.shape)),
    lambda r, x, y, i, j: jnp.tile(x, r),
    lambda r, x, y, i, j: jnp.concatenate([x, y], axis_of(x, i)),
    lambda r, x, y, i, j: jnp.split(x, 2, axis_of(x, i))[j % 2],
    lambda r, x, y, i, j: jnp.pad(x, 1, constant_values=float(j)),
    lambda r, x, y, i, j: lax.stop_gradient(x),
    lambda r, x, y, i, j: contracted(x, y, i, j),
    lambda r, x, y, i, j: batched(x, y, i, j),
    lambda r, x, y, i, j: scanned(x, y, i),
    lambda r, x, y, i, j: looped(x, i),
    lambda r, x, y, i, j: lax.map(lambda x: jnp.tanh(x).sum() / (r if i else 1), x),
    lambda r, x, y, i, j: lax.map(lambda pair: pair[0] * pair[1], (x, y)),
    lambda r, x, y, i, j: lax.scan(lambda s, x: (s + x, x), 0 * x[0], x)[0],
    lambda r, x, y, i, j: lax.scan(lambda n, x: (n + 1, n * x), 1.0, x)[1],
    lambda r, x, y, i, j: x[jnp.arange(r)],
    lambda r, x, y, i, j: x[jnp.arange(r), flags(y, i)],
    lambda r, x, y, i, j: x[jnp.arange(r), jnp.arange(r)],
    lambda r, x, y, i, j: x[jnp.arange(ROWS), i],
    lambda r, x, y, i, j: x[flags(y, i)],
    lambda r, x, y, i, j: x[:, i],
    lambda r, x, y, i, j: jnp.take_along_axis(x, flags(y, i), axis_of(x, i)),
    lambda r, x, y, i, j: jnp.take(x, flags(y, i), axis_of(x, j), mode="clip"),
    lambda r, x, y, i, j: jax.nn.one_hot(flags(x, i), ROWS),
    lambda r, x, y, i, j: jax.nn.one_hot(jnp.argmax(x, axis_of(x, i)), ROWS),
    lambda r, x, y, i, j: jnp.zeros((r, ROWS)).at[jnp.arange(r), flags(y, i)].set(x),
    lambda r, x, y, i, j: x.at[jnp.arange(r), flags(y, i)].add(0.5),
    lambda r, x, y, i, j: x.at[:, i].set(y),
    lambda r, x, y, i, j: x.at[i].set(y),
    lambda r, x, y, i, j: jnp.zeros(ROWS).at[flags(y, i)].add(x),
    lambda r, x, y, i, j: jnp.zeros((ROWS, ROWS)).at[flags(y, i)].add(x),
    lambda r, x, y, i, j: jnp.zeros(16 * ROWS).at[:r].set(x),
    lambda r, x, y, i, j: lax.dynamic_update_slice(x, y, (0,) * x.ndim),
    lambda r, x, y, i, j: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, y),
    lambda r, x, y, i, j: jax.vmap(lambda x, y: x * y.sum(), (i % 2, j % 2))(x, y),
    lambda r, x, y, i, j: jax.vmap(lambda x, y: x @ y, (i % 2, j % 2))(x, y),
    lambda r, x, y, i, j: jax.vmap(lambda x: jnp.convolve(x, y[0], "same"), i % 2)(x),
    lambda r, x, y, i, j: jnp.fft.fft(x, axis=axis_of(x, i)).real,
    lambda r, x, y, i, j: jax.grad(lambda x: (jnp.tanh(x @ y) ** 2).sum())(x),
    lambda r, x, y, i, j: jax.grad(lambda x: (jnp.tanh(x @ y) ** 2).mean())(x),
    lambda r, x, y, i, j: jax.nn.relu(x),
    lambda r, x, y, i, j: jax.nn.logsumexp(x, axis_of(x, i)),
    lambda r, x, y, i, j: reversed_gradient(x),
    lambda r, x, y, i, j: bounded(x),
    lambda r, x, y, i, j: centred(x),
    lambda r, x, y, i, j: jax.checkpoint(lambda x: jnp.sin(x) * y)(x),
    lambda r, x, y, i, j: jnp.zeros((r, ROWS)),
    lambda r, x, y, i, j: jnp.ones((ROWS, r)) * (1 + i),
    lambda r, x, y, i, j: jnp.floor(x),
    lambda r, x, y, i, j: flags(x.mean(), i) * 1.0,
    lambda r, x, y, i, j: jnp.average(x, axis_of(x, i), jnp.abs(y)),
    lambda r, x, y, i, j: (x * y).sum() / jnp.maximum(jnp.abs(y).sum(), 1),
    lambda r, x, y, i, j: x / y.sum(),
    lambda r, x, y, i, j: x / guarded(y.sum()),
    lambda r, x, y, i, j: x / x.sum() * x.sum(),
    lambda r, x, y, i, j: x.sum() / (y.mean() + 0.5 * i),
    lambda r, x, y, i, j: jnp.sort(x, axis_of(x, i))[jnp.argsort(jnp.argsort(x[:, 0]))],
    lambda r, x, y, i, j: lax.map(lambda x: jnp.tanh(x).sum(-1), x.reshape(2, -1, ROWS)),
    lambda r, x, y, i, j: lax.scan(
        lambda s, x: (s + jnp.tanh(x).sum(), None), 0.0, x.reshape(2 + i, -1, ROWS)
    )[0],
    lambda r, x, y, i, j: jax.vmap(lambda x: x @ y)(x.reshape(2, -1, ROWS)),
    lambda r, x, y, i, j: x.reshape(2, -1, *x.shape[1:]),
    # What asks for the number of rows.
    lambda r, x, y, i, j: x * (3 if r > i + j else 1),
    lambda r, x, y, i, j: x * (2 if r % (i + 2) == 0 else 1),
    lambda r, x, y, i, j: x / max(r, i + 2),
    lambda r, x, y, i, j: x if r > 1 else y,
    lambda r, x, y, i, j: (jnp.sin if r == 1 + i else jnp.cos)(x),
    lambda r, x, y, i, j: x.sum(0 if r > 1 else -1),
    lambda r, x, y, i, j: x * r if i else x / r**2,
    lambda r, x, y, i, j: x.squeeze(),
]
# Which draw noise, of the batch's keys, and of the rows' own noise in place of a shard's key.
NOISY: list[Callable[..., Any]] = [
    lambda b, x, i, j: x * drawn(x, SHARED, i, j),
    lambda b, x, i, j: drawn(b["y"], SHARED, i, j),
    lambda b, x, i, j: drawn(jnp.ones(len(b["x"])), SHARED, i, j),
    lambda b, x, i, j: drawn_of_rows(b["keys"], i, j),
    lambda b, x, i, j: drawn(jnp.ones((len(b["x"]), ROWS)), b["own"], i, j),
    lambda b, x, i, j: drawn(1 + b["x"] ** 2, b["own"], i, j),
    lambda b, x, i, j: of_numbers(b["keys"]),
]
# Which sum over the shards.
SUMMED: list[Callable[..., Any]] = [
    lambda x, i: lax.pmean(x, "shards"),
    lambda x, i: lax.pmean(x.mean(0), "shards"),
    lambda x, i: x - lax.pmean(x.mean(axis_of(x, i), keepdims=True), "shards"),
    lambda x, i: lax.pmean(x.sum(axis_of(x, i)), "shards"),
    lambda x, i: x / lax.pmean(jnp.abs(x).sum(), "shards"),
    lambda x, i: lax.pmax(lax.stop_gradient(x).max(axis_of(x, i)), "shards"),
]
LAST: list[Callable[[int, Any], Any]] = [
    lambda r, x: x.mean(),
    lambda r, x: x.sum() / r,
    lambda r, x: x.reshape(-1).sum() / r,
    lambda r, x: x.sum(),
    lambda r, x: x.sum() / max(r, 4),
]
# What an operation is, where its two inputs are among the last values, and its two numbers.
Program = Sequence[tuple[int, int, int, int, int]]
PROGRAMS = st.lists(
    st.tuples(
        st.integers(0, len(OPERATIONS) + len(NOISY) + len(SUMMED) - 1),
        st.integers(0, 5),
        st.integers(0, 7),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


def loss_of(program: Program, last: int, *, sums: bool) -> Callable[..., Any]:
    """The loss that a program computes; what does not fit together is left out."""

    def run(batch: Any, operation: int, x: Any, y: Any, i: int, j: int) -> Any:
        if operation < len(OPERATIONS):
            return OPERATIONS[operation](batch["x"].shape[0], x, y, i, j)
        operation -= len(OPERATIONS)
        if operation < len(NOISY):
            return NOISY[operation](batch, x, i, j)
        return SUMMED[operation - len(NOISY)](x, i) if sums else x

    def loss(batch: Any, w: Any, own: Any = None) -> Any:
        values = [batch["z"], batch["y"], w, w[0], batch["x"] @ w, batch["x"]]
        batch = {**batch, "own": own}
        for operation, one, other, i, j in program:
            x, y = (values[-1 - place % len(values)] for place in (one, other))
            try:
                # Where numbers are compared, a row's noise of the shard's key is an entry.
                first = operation - len(OPERATIONS)
                if own is None and first in (4, 5):
                    found = batch["noise"]
                else:
                    found = run(batch, operation, x, y, i, j)
            except (TypeError, ValueError, IndexError, ZeroDivisionError):
                continue
            if 0 < found.size < 5000 and found.ndim < 5:
                values.append(found.astype(jnp.float32))
        return LAST[last](batch["x"].shape[0], values[-1])

    return loss


def batch_of(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    shapes = {
        "x": (rows, ROWS),
        "y": (rows,),
        "z": (rows, ROWS, ROWS),
        "noise": (rows, ROWS),
    }
    batch = {
        name: jnp.asarray(rng.uniform(-1, 1.5, shape), jnp.float32)
        for name, shape in shapes.items()
    }
    return {**batch, "keys": jax.random.split(jax.random.key(rows), rows)}


W = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, ROWS)), jnp.float32)


def of_pieces(loss: Callable[..., Any], batch: Any, number: int) -> Any:
    """The mean of the losses of a number of pieces, and its gradient."""
    pieces = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)
    each = lambda w: jax.vmap(lambda piece: loss(piece, w), axis_name="shards")(pieces)
    run = jax.value_and_grad(lambda w: each(w).mean())
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(W)


def check(program: Program, last: int, rows: int, shards: int, *, sums: bool = False) -> OverRows:
    """What a program is found to be, after numbers have said that it is so."""
    loss, batch = loss_of(program, last, sums=sums), batch_of(rows * shards)
    kinds = []

    def look(piece: Any) -> Any:
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), piece)
        own = jax.eval_shape(lambda: jax.random.key(0))
        (fact,) = proof_of(loss, types, W, own=own, times=shards).facts
        kinds.append(found(fact).kind)
        return piece

    one = jax.tree.map(lambda x: x[None, :rows], batch)
    jax.eval_shape(jax.vmap(look, axis_name="shards"), one)
    (kind,) = kinds
    if kind not in (OverRows.MEAN, OverRows.SUM):
        return kind
    whole, mean = (of_pieces(loss, batch, number) for number in (1, shards))
    if all(np.isfinite(x).all() for x in jax.tree.leaves((whole, mean))):
        by = 1 if kind is OverRows.MEAN else shards
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(mean), strict=True):
            size = max(1.0, float(jnp.abs(by * other).max()))
            np.testing.assert_allclose(one, by * other, rtol=1e-3, atol=1e-4 * size)
    return kind


@pytest.mark.deep
@pytest.mark.parametrize("sums", [False, True])
@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    program=PROGRAMS,
    last=st.integers(0, len(LAST) - 1),
    rows=st.integers(1, 12),
    shards=st.integers(2, 8),
)
def test_what_is_proven_of_a_random_program_is_so(
    program: Program, last: int, rows: int, shards: int, sums: bool
):
    check(program, last, rows, shards, sums=sums)
