"""Same program: derivatives of their own are compared, also where one calls its own function."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from crossshard.jaxprs.same_program import is_same_program

ROWS = (1, 2, 4)


def same(function: Any) -> bool:
    return is_same_program([jax.make_jaxpr(function)(jnp.ones((n, 3))) for n in ROWS], ROWS)


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
