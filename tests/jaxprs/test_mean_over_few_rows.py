"""Proofs with the step's own numbers of rows: few of them, and losses that ask for the number."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.experimental import pallas as pl

from crossshard.jaxprs.mean_over_rows import is_free, is_mean, is_sum
from crossshard.jaxprs.row_facts import Divided, Free, Obstacle, OverRows, Total
from crossshard.jaxprs.same_program import is_same_program
from tests.jaxprs.proving import over_rows, proof_of

WIDTH = 4
W = np.float32(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
B = np.float32(np.random.default_rng(1).normal(size=WIDTH))
Loss = Callable[..., Any]


def batch_of(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def kind(loss: Loss, rows: int, shards: int) -> OverRows:
    return over_rows(loss, batch_of(rows), W, own=jax.random.key(0), times=shards).kind


mean = lambda x, w: jnp.tanh(x @ w).mean()
ASKS: dict[str, Loss] = {
    "at least 4": lambda x, w, k: jnp.tanh(x @ w).sum() / max(len(x), 4),
    "more than 2": lambda x, w, k: mean(x, w) * (3 if len(x) > 2 else 1),
    "exactly 12": lambda x, w, k: mean(x, w) * (3 if len(x) == 12 else 1),
    "one": lambda x, w, k: mean(x, w) * (3 if len(x) == 1 else 1),
    "another function of one": lambda x, w, k: (jnp.sin if len(x) == 1 else jnp.cos)(x @ w).mean(),
    "another value of one": lambda x, w, k: (x @ (w if len(x) == 1 else w.T)).mean(),
    "repeats one": lambda x, w, k: (
        (jnp.broadcast_to(x[0], (3, WIDTH)) if len(x) == 1 else x).sum() / len(x)
    ),
}


@pytest.mark.parametrize("name", ASKS)
def test_what_is_proven_of_a_loss_that_asks_for_the_number_is_so(name: str):
    loss = ASKS[name]
    whole = np.float32(np.random.default_rng(2).normal(size=(60, WIDTH)))
    value = functools.cache(lambda rows: loss(whole[:rows], W, None))
    for rows in (1, 2, 3, 4, 6):
        for shards in (2, 3, 4, 6):
            proven = kind(loss, rows, shards)
            if proven not in (OverRows.MEAN, OverRows.SUM):
                continue
            number = rows * shards
            pieces = [loss(x, W, None) for x in np.split(whole[:number], shards)]
            total = sum(pieces) / (shards if proven is OverRows.MEAN else 1)
            np.testing.assert_allclose(value(number), total, rtol=1e-4, atol=1e-6)


ORDINARY: dict[str, Loss] = {
    "bfloat16": lambda x, w, k: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).mean(),
    "biased": lambda x, w, k: jax.nn.relu(x @ w + B).mean(),
    "normed": lambda x, w, k: (
        (linen.LayerNorm().bind({"params": {"scale": B, "bias": B}})(x)).sum() / x.size
    ),
    "columns": lambda x, w, k: ((x[:, :1] * x) @ w).mean(),
    "in turn": lambda x, w, k: jax.lax.map(lambda x: jnp.tanh(x @ w).sum(), x).mean(),
    "noise": lambda x, w, k: (x * jax.random.normal(k, x.shape) @ w).mean(),
    "keys": lambda x, w, k: jax.vmap(lambda x, k: x * jax.random.normal(k, x.shape))(
        x, jax.random.split(k, len(x))
    ).mean(),
    "at rows": lambda x, w, k: x[jnp.arange(len(x)), jnp.zeros(len(x), int)].mean(),
    "entropy": lambda x, w, k: optax.softmax_cross_entropy_with_integer_labels(
        x @ w, jnp.argmax(x, 1)
    ).mean(),
    "entropy of tokens": lambda x, w, k: optax.softmax_cross_entropy_with_integer_labels(
        x[:, :, None] * w, jnp.argmax(x[:, :, None] + w, 2)
    ).mean(),
    "products of matrices": lambda x, w, k: (
        jax.nn.softmax((x[:, None] * w) @ (x[:, None] * w).swapaxes(1, 2)).max(1).mean()
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_mean_is_proven_of_one_row_too(name: str):
    for rows, shards in ((1, 2), (1, 3), (1, 4), (2, 2), (3, 7), (4, 4)):
        assert kind(ORDINARY[name], rows, shards) is OverRows.MEAN, (rows, shards)


def test_what_compares_rows_compares_one_with_those_of_others():
    assert kind(lambda x, w, k: (x @ w).std(), 1, 4) is OverRows.COMPARED


def test_all_outputs_have_facts():
    def outputs(x: Any, w: Any, own: Any) -> Any:
        total = (x @ w).sum()
        return {"a": (total, x.shape[0]), "b": [(w**2).sum(), x.std(), total / x[:, 0].sum()]}

    facts = proof_of(outputs, batch_of(6), W, times=3).facts
    total, count, free, compared, ratio = facts
    assert isinstance(total, Total)
    assert (is_sum(total), is_mean(total), is_free(total)) == (True, False, False)
    assert isinstance(count, Free)
    assert (is_sum(count), is_mean(count), is_free(count)) == (True, False, False)
    assert (is_sum(free), is_mean(free), is_free(free)) == (False, True, True)
    assert isinstance(compared, Obstacle)
    assert isinstance(ratio, Divided)
    for fact in (compared, ratio):
        assert (is_sum(fact), is_mean(fact), is_free(fact)) == (False, False, False)


# Derivatives of their own are compared, also where one calls its own function.


def same(function: Any) -> bool:
    return is_same_program(
        [jax.make_jaxpr(function)(jnp.ones((n, 3))) for n in (1, 2, 4)], (1, 2, 4)
    )


@jax.custom_vjp
def rounded(x: jax.Array) -> jax.Array:
    return jnp.round(x)


rounded.defvjp(lambda x: (rounded(x), None), lambda _, cotangent: (cotangent,))


@jax.custom_vjp
def scaled_by_rows(x: jax.Array) -> jax.Array:
    return 2 * x


scaled_by_rows.defvjp(
    lambda x: (scaled_by_rows(x), max(len(x), 2)), lambda number, cotangent: (number * cotangent,)
)


@pytest.mark.parametrize(
    "function",
    [rounded, jax.nn.log_sigmoid, jax.nn.softplus, lambda x: jnp.logaddexp(x, 2 * x)],
    ids=["own forward pass", "log_sigmoid", "softplus", "logaddexp"],
)
def test_a_derivative_that_calls_its_own_function(function: Any):
    assert same(lambda x: function(x).sum() / len(x))


def test_a_derivative_that_looks_at_the_number_of_rows():
    assert not same(lambda x: scaled_by_rows(x).sum() / len(x))


# Kernels.


def kernel(rows: int, *, block: int = 1, at: int = 0, factor: float = 2.0) -> Any:
    """Return the jaxpr of a kernel, which takes three steps of ``block`` slices for each row."""

    def scaled(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * factor

    spec = pl.BlockSpec((block, 8), lambda i: (i, at))
    x = jax.ShapeDtypeStruct((3 * rows * block, 8), jnp.bfloat16)
    return jax.make_jaxpr(
        pl.pallas_call(scaled, out_shape=x, grid=(3 * rows,), in_specs=[spec], out_specs=spec)
    )(x)


OTHER_KERNELS = {
    "the same": ({}, True),
    "larger blocks": ({"block": 2}, False),
    "other blocks": ({"at": 1}, False),
    "another factor": ({"factor": 3.0}, False),
}


@pytest.mark.parametrize("name", OTHER_KERNELS)
def test_a_kernel_is_the_same_on_a_grid_that_grows_with_the_rows(name: str):
    of_one_row, expected = OTHER_KERNELS[name]
    jaxprs = [kernel(1, **of_one_row), kernel(2), kernel(4)]
    assert is_same_program(jaxprs, (1, 2, 4)) is expected


def test_the_grid_of_a_kernel_grows_as_the_rows_do():
    assert not is_same_program([kernel(1), kernel(2), kernel(4)], (1, 2, 8))
