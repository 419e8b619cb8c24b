"""Widen: evaluates a jaxpr so that numbers show more: in 32 bits, or with other choices, too."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard.jaxprs.primitives import (
    ALONG_ONE,
    CHOOSES,
    ELEMENTWISE,
    LINEAR,
    OVER_SHARDS,
    PASSES,
    REDUCTIONS,
)
from crossshard.jaxprs.rewrite import evaluate
from crossshard.jaxprs.walk import (
    Call,
    Cond,
    Scan,
    While,
    constants,
    control_flow,
    has_own_derivative,
    has_ref,
    jaxprs_within,
    opened,
)

# Primitives that compute in the dtype of their inputs, or in one of these parameters.
_ANY_DTYPE = (
    ELEMENTWISE
    | LINEAR
    | PASSES
    | OVER_SHARDS
    | REDUCTIONS
    | set(ALONG_ONE)
    | set(CHOOSES)
    | {"all_gather", "all_to_all", "conv_general_dilated", "dot_general", "ppermute"}
    | {"reduce_scatter", "top_k"}
) - {"bitcast_convert_type", "nextafter"}
_DTYPES = "new_dtype", "preferred_element_type"


def in_32_bits(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a jaxpr, in which floats have at least 32 bits.

    Kernels, and functions with a derivative of their own, compute in the dtypes that they know.
    """
    return evaluate(jaxpr, list(map(wide, inputs)), _apply, literal=lambda x: wide(x.val))


def _apply(equation: Any, given: list[Any]) -> Sequence[Any]:
    run = lambda jaxpr: lambda *args: in_32_bits(jaxpr, args)
    match control_flow(equation):
        case Call(jaxpr) if not has_own_derivative(equation):
            return in_32_bits(jaxpr, given)
        case Cond(branches):
            return lax.switch(given[0], list(map(run, branches)), *given[1:])
        # A loop over rows, each of which ends by itself, has a condition for each.
        case While(cond, of_cond, body, of_body) if not opened(cond).outvars[0].aval.shape:
            first, second = given[:of_cond], given[of_cond : of_cond + of_body]
            return lax.while_loop(
                lambda carry: run(cond)(*first, *carry)[0],
                lambda carry: run(body)(*second, *carry),
                given[of_cond + of_body :],
            )
        case Scan(body, fixed, carried, (length, reverse)):

            def turn(carry: Any, rows: Any) -> tuple[Any, Any]:
                found = run(body)(*given[:fixed], *carry, *rows)
                return found[:carried], found[carried:]

            start, rows = given[fixed : fixed + carried], given[fixed + carried :]
            carry, stacked = lax.scan(turn, start, rows, length=length, reverse=reverse)
            return [*carry, *stacked]
    if equation.primitive.name in _ANY_DTYPE and not jaxprs_within(equation):
        params = {
            name: jnp.dtype(jnp.float32) if name in _DTYPES and _is_coarse(value) else value
            for name, value in equation.params.items()
        }
        return _jax.bound(equation.replace(params=params), given)
    atoms = equation.invars
    narrow = [
        x.astype(atom.aval.dtype) if _is_coarse(getattr(atom.aval, "dtype", None)) else x
        for atom, x in zip(atoms, given, strict=True)
    ]
    found = _jax.bound(equation, narrow)
    return found if has_ref(equation) else list(map(wide, found))


def with_gates_turned(
    jaxpr: Any, inputs: Sequence[Any], levels: Sequence[int], turned: list[Any]
) -> list[Any]:
    """Return the outputs of a jaxpr as ``in_32_bits`` does, with other choices at its gates.

    A gate is a condition, of a ``jnp.where`` or a ``lax.cond``, that depends on inputs, and on
    none that has rows. In loops, kernels and functions with a derivative of their own none is
    looked for.

    Args:
      jaxpr: the jaxpr.
      inputs: its inputs.
      levels: of each, 2 if it has rows, 1 if not; 0 if it is a constant.
      turned: a list that the equations of the gates are added to.
    """
    pairs = [(wide(x), level) for x, level in zip(inputs, levels, strict=True)]
    found = _turned(jaxpr, pairs, turned)
    return [x for x, _ in found]


def _turned(jaxpr: Any, pairs: Sequence[Any], turned: list[Any]) -> list[Any]:
    def apply(equation: Any, given: list[Any]) -> Sequence[Any]:
        call = control_flow(equation)
        if isinstance(call, Call) and not has_own_derivative(equation):
            return _turned(call.jaxpr, given, turned)
        values, levels = [x for x, _ in given], [level for _, level in given]
        is_gate = bool(levels) and levels[0] == _OF_NO_ROW
        if is_gate and isinstance(call, Cond):
            values[0] = (values[0] + 1) % len(call.branches)
            turned.append(equation)
        elif is_gate and equation.primitive.name == "select_n" and values[0].dtype == bool:
            values[0] = ~values[0]
            turned.append(equation)
        return [(x, max(levels, default=0)) for x in _apply(equation, values)]

    consts = [(x, 0) for x in constants(jaxpr)]
    return evaluate(jaxpr, pairs, apply, consts=consts, literal=lambda x: (wide(x.val), 0))


_OF_NO_ROW = 1  # the level of what depends on inputs without rows alone


@functools.cache
def _is_coarse(dtype: Any) -> bool:
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_float and jnp.finfo(dtype).bits < 32


def wide(x: Any) -> Any:
    """Cast a float to at least 32 bits; anything else stays as it is."""
    return x.astype(jnp.float32) if is_inexact(x) and _is_coarse(jnp.result_type(x)) else x
