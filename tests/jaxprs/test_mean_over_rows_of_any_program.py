"""Random programs whose axes coincide in length: what is proven of them is so, by numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from crossshard.jaxprs.mean_over_rows import OverRows, over_rows

# The rows of a part, and the length of every other axis.
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
]
LAST: list[Callable[[int, Any], Any]] = [
    lambda r, x: x.mean(),
    lambda r, x: x.sum() / r,
    lambda r, x: x.reshape(-1).sum() / r,
    lambda r, x: x.sum(),
]
# What an operation is, where its two inputs are among the last values, and its two numbers.
Program = Sequence[tuple[int, int, int, int, int]]
PROGRAMS = st.lists(
    st.tuples(
        st.integers(0, len(OPERATIONS) - 1),
        st.integers(0, 5),
        st.integers(0, 7),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


def loss_of(program: Program, last: int) -> Callable[..., Any]:
    """The loss that a program computes; what does not fit together is left out."""

    def loss(batch: Any, w: Any, own: Any = ()) -> Any:
        rows = batch["x"].shape[0]
        values = [batch["z"], batch["y"], w, w[0], batch["x"] @ w, batch["x"]]
        for operation, one, other, i, j in program:
            x, y = (values[-1 - place % len(values)] for place in (one, other))
            try:
                found = OPERATIONS[operation](rows, x, y, i, j)
            except (TypeError, ValueError, IndexError, ZeroDivisionError):
                continue
            if 0 < found.size < 5000 and found.ndim < 5:
                values.append(found.astype(jnp.float32))
        return LAST[last](rows, values[-1])

    return loss


def batch_of(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    shapes = {"x": (rows, ROWS), "y": (rows,), "z": (rows, ROWS, ROWS)}
    return {
        name: jnp.asarray(rng.uniform(-1, 1.5, shape), jnp.float32)
        for name, shape in shapes.items()
    }


W = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, ROWS)), jnp.float32)


def check(program: Program, last: int) -> OverRows:
    """What a program is found to be, after numbers have said that it is so."""
    loss = loss_of(program, last)
    finding = over_rows(loss, batch_of(ROWS), W)
    if finding.kind not in (OverRows.MEAN, OverRows.SUM):
        return finding.kind
    for number in (2, 4):
        batch = batch_of(number * ROWS)
        parts = [
            jax.tree.map(lambda x, at=at: x[at * ROWS : (at + 1) * ROWS], batch)
            for at in range(number)
        ]
        whole = jax.value_and_grad(loss, 1)(batch, W)
        each = [jax.value_and_grad(loss, 1)(part, W) for part in parts]
        by = number if finding.kind is OverRows.MEAN else 1
        added = jax.tree.map(lambda *x, by=by: sum(x) / by, *each)
        if not all(np.isfinite(x).all() for x in jax.tree.leaves((whole, each))):
            continue
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(added), strict=True):
            size = max(1.0, *(float(jnp.abs(x).max()) for x in jax.tree.leaves(each)))
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * size)
    return finding.kind


@pytest.mark.deep
@hypothesis.settings(max_examples=400)
@hypothesis.given(PROGRAMS, st.integers(0, len(LAST) - 1))
def test_what_is_proven_of_a_random_program_is_so(program: Program, last: int):
    check(program, last)
