"""Divisor: computes the sum over rows that divides a loss, and compares it with another."""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _jax
from crossshard.jaxprs.rewrite import evaluate, flat

# How often two functions are compared on numbers that are drawn; and up to which relative
# difference two float32 sums of the same numbers, in another order, are equal.
_TRIALS, _TOLERANCE = 4, 1e-5


class Value(NamedTuple):
    """A value in a jaxpr.

    Attributes:
      compute: computes it, float[], from the inputs that it reads.
      reads: the places of these among the inputs of the jaxpr.
    """

    compute: Callable[..., Any]
    reads: tuple[int, ...]


def value_in(jaxpr: Any, of: Any) -> Value | None:
    """The sum of a value in a closed jaxpr; ``None`` if it is within a loop, or in a branch.

    Args:
      jaxpr: the jaxpr.
      of: a variable of it; the place of an input; or ``(output, of)``, a value in the call that has
        this output. See ``Total.of``.
    """
    found: list[bool] = []

    def compute(*args: Any) -> Any:
        value = args[of] if isinstance(of, int) else _value(jaxpr, args, of)
        found.append(value is not None)
        return jnp.asarray(jnp.sum(0.0 if value is None else value), float)

    traced = jax.make_jaxpr(compute)(*jaxpr.in_avals)
    pruned, reads = _jax.pruned(traced, [True])
    if not found[0] or any(isinstance(x, jax.core.Tracer) for x in pruned.consts):
        return None
    run = _jax.as_function(pruned)
    places = tuple(place for place, is_read in enumerate(reads) if is_read)
    return Value(lambda *args: run(*args)[0], places)


def _value(jaxpr: Any, args: Sequence[Any], of: Any) -> Any:
    """The value, if it is computed at the top of the jaxpr or in calls."""
    output, inner = of if isinstance(of, tuple) else (None, of)
    wanted, opened = of, _jax.opened(jaxpr)
    while isinstance(wanted, tuple):
        _, wanted = wanted
    known = dict(zip(opened.constvars, _jax.constants(jaxpr), strict=True))
    known.update(zip(opened.invars, args, strict=True))
    found = [known[wanted]] if wanted in known else []

    def on(equation: Any, given: list[Any]) -> list[Any]:
        call = _jax.control_flow(equation) if equation.outvars[:1] == [output] else None
        if isinstance(call, _jax.Call) and not found:
            value = _value(_jax.closed(call.jaxpr), given, inner)
            found.extend([] if value is None else [value])
        outputs = _jax.bound(equation, given)
        pairs = zip(equation.outvars, outputs, strict=True)
        found.extend(value for variable, value in pairs if variable is wanted)
        return outputs

    evaluate(jaxpr, args, on)
    return found[0] if found else None


def agree(one: Callable[..., Any], other: Callable[..., Any], *types: Any) -> bool:
    """Whether two functions of inputs of these types are one program, or agree on drawn numbers.

    One may be the other times a constant.
    """
    traced = [jax.make_jaxpr(each)(*types) for each in (one, other)]
    if len({str(_jax.without_unread(flat(each))) for each in traced}) == 1:
        return True
    both = jax.make_jaxpr(lambda *args: (one(*args), other(*args)))(*types)
    pruned, reads = _jax.pruned(both, [True, True])
    if any(isinstance(x, jax.core.Tracer) for x in pruned.consts):
        return False
    leaves = [x for x, is_read in zip(jax.tree.leaves(types), reads, strict=True) if is_read]
    draw = np.random.default_rng(0)

    def drawn() -> Any:
        run = jax.jit(_jax.as_function(pruned))
        draws = ([_drawn(draw, x.shape, x.dtype) for x in leaves] for _ in range(_TRIALS))
        return np.array([jax.device_get(run(*each)) for each in draws], np.float64)

    found = _outside(drawn)
    first, by = found[0]
    if not np.isfinite(found).all() or not first or not by:
        return False
    return all(are_equal(x * by, y * first) for x, y in found)


def _outside(function: Callable[[], Any]) -> Any:
    """What a function returns that runs arrays, outside of what is traced and of the mesh there.

    Both belong to a thread, and where the user has set a mesh, arrays would lie on its axes.
    """
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

    def run() -> Any:
        with jax.enable_x64(x64):
            return function()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def are_equal(one: Any, other: Any) -> bool:
    """Whether two sums of the same numbers are equal but for rounding."""
    one, other = np.float64(one), np.float64(other)
    return bool(np.abs(one - other) <= _TOLERANCE * max(np.abs(one), np.abs(other)))


def _drawn(draw: np.random.Generator, shape: Any, dtype: Any) -> Any:
    """Numbers of a dtype: small ones, and zeros among them; integers of both signs."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        keys = jnp.asarray(draw.integers(0, 2**31, int(np.prod(shape))), jnp.uint32)
        return jax.vmap(jax.random.key)(keys).reshape(shape)
    if dtype == np.bool_:
        return draw.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -2
        return jnp.asarray(draw.integers(low, 4, shape), dtype)
    zeros = draw.random(shape) < 0.3
    return jnp.asarray(np.where(zeros, 0, draw.uniform(0, 2, shape)), dtype)
