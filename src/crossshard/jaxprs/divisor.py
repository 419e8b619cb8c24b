"""Divisor: computes the sum over rows that divides a loss, and compares it with another."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _jax

# How often two functions are compared on numbers that are drawn, and up to which difference two
# float32 sums of as many numbers, in another order, are equal.
_TRIALS, TOLERANCE = 4, 1e-5


def value_in(jaxpr: Any, of: Any) -> Callable[..., Any] | None:
    """A function of the inputs of a closed jaxpr that computes a value in it.

    Args:
      jaxpr: the jaxpr.
      of: a variable of it; or ``(output, of)``, a variable in the call that has this output.

    Returns:
      The function; ``None`` if there is no such value, as within a loop.
    """
    found: list[bool] = []

    def compute(*args: Any) -> Any:
        value = _value(jaxpr, args, of)
        found.append(value is not None)
        return 0.0 if value is None else value

    traced = jax.make_jaxpr(compute)(*jaxpr.in_avals)
    run = _jax.as_function(_jax.without_unread(traced))
    return (lambda *args: jnp.asarray(run(*args)[0], float).reshape(())) if found[0] else None


def _value(jaxpr: Any, args: Sequence[Any], of: Any) -> Any:
    """The value, if it is computed at the top of the jaxpr or in calls."""
    opened, (output, inner) = _jax.opened(jaxpr), of if isinstance(of, tuple) else (None, of)
    wanted = of
    while isinstance(wanted, tuple):
        _, wanted = wanted
    known = dict(zip(opened.constvars, _jax.constants(jaxpr), strict=True))
    known.update(zip(opened.invars, args, strict=True))
    for equation in opened.eqns:
        if wanted in known:
            break
        given = [x.val if _jax.is_literal(x) else known[x] for x in equation.invars]
        call = _jax.control_flow(equation) if equation.outvars[:1] == [output] else None
        if isinstance(call, _jax.Call):
            value = _value(_jax.closed(call.jaxpr), given, inner)
            if value is not None:
                return value
        known.update(zip(equation.outvars, _jax.bound(equation, given), strict=True))
    return known.get(wanted)


def are_written_alike(one: Callable[..., Any], other: Callable[..., Any], *types: Any) -> bool:
    """Whether two functions of inputs of these types are the same program."""
    texts = {
        str(_jax.without_unread(_jax.flat(jax.make_jaxpr(each)(*types)))) for each in (one, other)
    }
    return len(texts) == 1


def agree_on_chance(one: Callable[..., Any], other: Callable[..., Any], *types: Any) -> bool:
    """Whether two functions return equal numbers for inputs of these types that are drawn."""
    draw = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        both = jax.jit(lambda *args: (one(*args), other(*args)))
        for _ in range(_TRIALS):
            args = jax.tree.map(lambda x: _drawn(draw, x), types)
            if not are_equal(*jax.device_get(both(*args))):
                return False
    return True


def are_equal(one: Any, other: Any) -> bool:
    """Whether two sums of the same numbers are equal but for rounding."""
    one, other = np.float64(one), np.float64(other)
    return bool(np.abs(one - other) <= TOLERANCE * max(np.abs(one), np.abs(other)))


def _drawn(draw: np.random.Generator, like: Any) -> Any:
    """Numbers of a type, small ones of both signs, and zeros among them."""
    shape, dtype = like.shape, like.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        keys = draw.integers(0, 2**31, shape).reshape(-1)
        return jax.vmap(jax.random.key)(keys).reshape(shape)
    if dtype == np.bool_:
        return draw.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -2
        return draw.integers(low, 4, shape).astype(dtype)
    zeros = draw.random(shape) < 0.3
    return jnp.asarray(np.where(zeros, 0, draw.uniform(0, 2, shape)), dtype)
