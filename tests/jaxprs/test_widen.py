"""A function of 16-bit floats computes in 32 bits, but for kernels and derivatives of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from crossshard.jaxprs.widen import (
    OF_PARAMS,
    OF_ROWS,
    OF_WHOLE,
    Gates,
    in_32_bits,
    with_gates_turned,
)

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


def test_a_backward_pass_of_its_own_has_32_bits():
    product = jax.custom_vjp(lambda x, w, shift: jnp.roll(x, shift, 0) @ w)
    product.defvjp(
        lambda x, w, shift: (jnp.roll(x, shift, 0) @ w, (x, w, shift)),
        # Another number than autodiff's, which would be seen.
        lambda kept, slope: (slope @ kept[1].T, 3 * jnp.roll(kept[0], kept[2], 0).T @ slope, None),
    )
    x, shift = X.astype(jnp.bfloat16), jnp.int32(2)
    loss = lambda w: (product(x.astype(w.dtype), w, shift) ** 2).sum()
    found = jax.grad(lambda w: in_32_bits(jax.make_jaxpr(loss)(x), [w])[0])(jnp.float32(x))
    np.testing.assert_allclose(found, jax.grad(loss)(jnp.float32(x)), rtol=1e-5)


def chosen(x: Any, w: Any, at: Any) -> Any:
    """One part for each kind of condition: of rows, of a constant, and of neither."""
    of_rows = jnp.where(x > 0, x, 0).sum()
    constant = jnp.where(np.array([True, False, True]), w, 7 * w).sum()
    at_last = jnp.where(at > 5, w, -w).sum()
    branch = lax.cond(at > 6, lambda: 2 * w.sum(), lambda: 3 * w.sum())
    both = jnp.where(at + x.sum() > 5, 1.0, 2.0)
    return jnp.stack([of_rows, constant, at_last, branch, both])


def in_loops(x: Any, w: Any, at: Any) -> Any:
    layer = lambda carry, row: (carry + jnp.where(at > 5, row.sum(), 1.0), jnp.minimum(w, 2.0))
    end, bounds = lax.scan(layer, at * 0.5, jnp.stack([x, x]))
    turn = lambda carry: (carry[0] + 1, jnp.where(at > 5, 1.0, 2.0))
    return jnp.stack([end, bounds.sum(), lax.while_loop(lambda c: c[0] < 2, turn, (0, 0.0))[1]])


# A function, its values, and those with each gate turned, or a half or 5 in its place.
GATES: dict[str, tuple[Any, list[float], list[list[float]]]] = {
    "conditions": (
        chosen,
        [1, 9, -3, 9, 2],
        [[1, 9, 3, 9, 2], [1, 9, -3, 6, 2], [1, 9, -3, 9, 2]],
    ),
    "loops": (in_loops, [2, 6, 2], [[-2, 6, 2], [2, 12, 2], [2, 6, 0.5]]),
    "a factor": (lambda x, w, at: x.sum() * (at / 2), [0], [[-0.5]]),
    "a rank": (lambda x, w, at: 1.0 * (jnp.arange(3) < 2 - at), [1, 1, 0], [[1, 1, 1]]),
    "a comparison of parameters": (lambda x, w, at: (w > 2.0) * w, [0, 0, 0], [[1, 1, 1]]),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_that_no_row_decides_are_turned_and_no_others(name: str):
    of, values, others = GATES[name]
    inputs, gates = (jnp.float32([1.0, -2.0]), jnp.ones(3), jnp.int32(0)), Gates()
    trace = jax.make_jaxpr(of)(*inputs)
    run = lambda: with_gates_turned(trace, inputs, [OF_ROWS, OF_PARAMS, OF_WHOLE], gates)[0]
    np.testing.assert_allclose(np.ravel(run()), values)
    assert len(gates.equations) == len(others)
    for place, want in enumerate(others):
        gates.numbers = np.where(np.arange(len(gates.numbers)) == place, np.float32(0.5), 0)
        np.testing.assert_allclose(np.ravel(run()), want)
    tries = [tuple(each[: len(others)] > 0) for each in gates.tries()]
    assert len(set(tries)) == len(tries) == 2 ** len(others) - 1
