"""A function of 16-bit floats computes in 32 bits, but for kernels and derivatives of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from crossshard.jaxprs.widen import in_32_bits, with_gates_turned

X = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)


@jax.custom_vjp
def rounded(x: Any) -> Any:
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, slope: (slope,))


def branches(x: Any, dtype: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x.astype(dtype) - 1, x)


def loop(x: Any, dtype: Any) -> Any:
    start = 0, x, dtype(0)
    turn = lambda carry: (carry[0] + 1, carry[1] * dtype(1.25), carry[2] + carry[1].mean())
    return lax.while_loop(lambda carry: carry[0] < 4, turn, start)[1:]


def rows(x: Any, dtype: Any) -> Any:
    turn = lambda carry, row: (carry + row.sum(), jnp.tanh(carry * row))
    return lax.scan(jax.checkpoint(turn), dtype(0), x, reverse=True)


def convolved(x: Any, dtype: Any) -> Any:
    kernel = jnp.ones((1, 1, 2, 2), dtype) / 3
    return lax.conv_general_dilated(x[None, None], kernel, (1, 1), "SAME")


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "products": lambda x, dtype: jnp.einsum("ij,jk->k", x, x, preferred_element_type=dtype),
    "choices": lambda x, dtype: jnp.sort(jnp.where(x > 0, x, x[::-1]), 1).cumsum(0)[:, 2:5] / 3,
    "normalised": lambda x, dtype: jax.jit(jax.nn.softmax)(x) - x.astype(dtype).std(0),
    "branches": branches,
    "loop": loop,
    "rows": rows,
    "convolved": convolved,
}


def widened(function: Callable[..., Any], *args: Any) -> list[Any]:
    return in_32_bits(jax.make_jaxpr(function)(*args), jax.tree.leaves(args))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_function_in_float32(name: str, dtype: Any):
    of = FUNCTIONS[name]
    found = widened(lambda x: of(x, dtype), X.astype(dtype))
    want = jax.tree.leaves(of(jnp.float32(X.astype(dtype)), jnp.float32))
    for one, other in zip(found, want, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_derivative_of_its_own_is_kept():
    loss = lambda x: (rounded(x) * x).sum()
    slope = jax.grad(lambda x: widened(loss, x)[0])(jnp.bfloat16([0.25, 0.75]))
    np.testing.assert_allclose(np.float32(slope), [0.25, 1.75])


def chosen(x: Any, w: Any, at: Any) -> Any:
    """One part for each kind of condition: of rows, of a constant, and of neither."""
    of_rows = jnp.where(x > 0, x, 0).sum()
    constant = jnp.where(np.array([True, False, True]), w, 7 * w).sum()
    at_last = jnp.where(at > 5, w, -w).sum()
    branch = lax.cond(at * w.sum() > 5, lambda: 2 * w.sum(), lambda: 3 * w.sum())
    both = jnp.where(at + x.sum() > 5, 1.0, 2.0)
    return jnp.stack([of_rows, constant, at_last, branch, both])


def test_gates_that_no_row_decides_are_turned_and_no_others():
    x, w, at = jnp.float32([1.0, -2.0]), jnp.ones(3), jnp.int32(0)
    turned = list[Any]()
    trace = jax.make_jaxpr(chosen)(x, w, at)
    (found,) = with_gates_turned(trace, [x, w, at], [2, 1, 1], turned)
    np.testing.assert_allclose(chosen(x, w, at), [1, 9, -3, 9, 2])
    np.testing.assert_allclose(found, [1, 9, 3, 6, 2])
    assert len(turned) == 2
