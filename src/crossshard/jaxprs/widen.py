"""Widen: evaluates a jaxpr so that numbers show more: in 32 bits, or with other values, too."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from crossshard.jaxprs.same_program import rule_of_derivative, takes_cotangents
from crossshard.jaxprs.walk import (
    Call,
    Cond,
    Scan,
    While,
    bits_through,
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


def in_32_bits(jaxpr: Any, inputs: Sequence[Any], apply: Any = None) -> list[Any]:
    """Return the outputs of a jaxpr, in which floats have at least 32 bits.

    Kernels, and functions with a forward derivative of their own, compute in the dtypes that they
    know. ``apply`` evaluates an equation, if it is another function than here.
    """
    literal = lambda x: wide(x.val)
    return evaluate(jaxpr, list(map(wide, inputs)), apply or _apply, literal=literal)


def _apply(equation: Any, given: list[Any], inner: Any = in_32_bits) -> Sequence[Any]:
    """Return the outputs of an equation; ``inner`` evaluates what it calls."""
    run = lambda jaxpr: lambda *args: inner(jaxpr, args)
    match control_flow(equation):
        # A rule may call the function whose rule it is, and is not differentiated itself.
        case Call(jaxpr) if not has_own_derivative(equation) or inner is _in_rule:
            return inner(jaxpr, given)
        case Call() if takes_cotangents(equation) and all(
            is_inexact(x.aval) for x in equation.outvars
        ):
            return _with_own_gradient(equation, given)
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


def _in_rule(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a rule of derivatives as ``in_32_bits`` does."""
    return in_32_bits(jaxpr, inputs, functools.partial(_apply, inner=_in_rule))


def _with_own_gradient(equation: Any, given: list[Any]) -> Sequence[Any]:
    """Return the outputs of a function with a backward pass of its own, and let it have 32 bits."""
    rule, outputs = rule_of_derivative(equation), [x.aval for x in equation.outvars]
    varied = [place for place, x in enumerate(equation.invars) if is_inexact(x.aval)]

    def forward(*args: Any) -> Any:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in outputs]
        return _in_rule(rule, [*args, *zeros])[len(varied) :], args

    def backward(args: Any, slopes: Any) -> tuple[Any, ...]:
        found = dict(zip(varied, _in_rule(rule, [*args, *slopes]), strict=False))
        return tuple(found.get(place) for place in range(len(args)))

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    found: Sequence[Any] = run(*given)
    return found


# What a value depends on, as bits; a constant on nothing.
OF_WHOLE, OF_ROWS, OF_PARAMS = 1, 2, 4
# More gates share their numbers.
_MOST_GATES = 64
# So many combinations of them are tried.
_MOST_TRIES = 16
COMPARES = frozenset("eq ne lt le gt ge".split())
_SWAPPED = {"max": lax.min_p, "min": lax.max_p}


class Gates:
    """What no row decides in a loss, and another value for some of it.

    That is a condition of a ``jnp.where`` or a ``lax.cond``; a comparison, or a bound, of
    parameters; and a single number that only whole entries and the model state make, such as a
    schedule of the step, where it meets rows or parameters. In while loops, kernels and functions
    with a derivative of their own nothing is looked for.

    Attributes:
      numbers: float[gates], from 0 to 1, the values of some, and 0 for those that stay.
      equations: the equation of each gate.
    """

    def __init__(self) -> None:
        self.numbers: Any = np.zeros(_MOST_GATES, np.float32)
        self.clear()

    def clear(self) -> None:
        """Forget the gates, for another trace."""
        self.equations: list[Any] = []
        self._places: dict[Any, int] = {}

    def number(self, place: Any, equation: Any) -> Any:
        """Return the number of the gate at this place of the trace."""
        if place not in self._places:
            self._places[place] = len(self.equations)
            self.equations.append(equation)
        return self.numbers[self._places[place] % _MOST_GATES]

    def tries(self) -> list[Any]:
        """Return values for ``numbers``: all combinations of a few gates, or many at random."""
        draw, number = np.random.default_rng(0), min(len(self.equations), _MOST_GATES)
        every = itertools.product((False, True), repeat=number)
        some = draw.random((_MOST_TRIES, number)) < 1 / 2
        chosen = list(every)[1:] if 2**number <= _MOST_TRIES else some
        found = np.zeros((len(chosen), _MOST_GATES), np.float32)
        found[:, :number] = np.where(chosen, draw.uniform(0.2, 0.9, found[:, :number].shape), 0)
        return list(found)


def with_gates_turned(
    jaxpr: Any, inputs: Sequence[Any], reads: Sequence[int], gates: Gates
) -> list[Any]:
    """Return the outputs of a jaxpr as ``in_32_bits`` does, with other values at its gates.

    Args:
      jaxpr: the jaxpr.
      inputs: its inputs.
      reads: of each, the bit of what it is.
      gates: the gates that are found, and their numbers.
    """
    gates.clear()
    pairs = [(wide(x), bits) for x, bits in zip(inputs, reads, strict=True)]
    return [x for x, _ in _turned(jaxpr, pairs, gates, ())]


def _turned(jaxpr: Any, pairs: Sequence[Any], gates: Gates, path: tuple[Any, ...]) -> list[Any]:
    def apply(equation: Any, given: list[Any]) -> Sequence[Any]:
        call, within = control_flow(equation), (*path, id(equation))
        if isinstance(call, Call) and not has_own_derivative(equation):
            return _turned(call.jaxpr, given, gates, within)
        values, reads = [x for x, _ in given], [bits for _, bits in given]
        found, of_inputs = bits_through(equation, reads), reads
        if call is None:
            values = _other_inputs(equation, values, reads, gates, path)
        elif isinstance(call, Cond):
            of_inputs = reads[1:]
            if _is_free(reads[0]):
                number, others = gates.number(within, equation), len(call.branches) - 1
                values[0] += jnp.where(number > 0, 1 + jnp.int32(number * others), 0)
                values[0] %= len(call.branches)
        elif isinstance(call, Scan):
            end = call.constants + call.carried
            of_inputs = [*reads[: call.constants], *found[: call.carried], *reads[end:]]
        inner = in_32_bits if isinstance(call, While) else None
        outputs = _apply(equation, values, inner or run(of_inputs, within))
        if call is None and found and _is_free(found[0]):
            outputs = _other_outputs(equation, values, outputs, found[0], gates, within)
        return list(zip(outputs, found, strict=True))

    def run(reads: Sequence[int], within: tuple[Any, ...]) -> Any:
        def inner(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
            return [x for x, _ in _turned(jaxpr, [*zip(args, reads, strict=True)], gates, within)]

        return inner

    # What is traced outside of a loss is the seed of its noise.
    consts = [(x, OF_WHOLE * isinstance(x, jax.core.Tracer)) for x in constants(jaxpr)]
    return evaluate(jaxpr, pairs, apply, consts=consts, literal=lambda x: (wide(x.val), 0))


def _is_free(bits: int) -> bool:
    """Return whether a value depends on something, and on no row."""
    return bits > 0 and not bits & OF_ROWS


def _other_inputs(
    equation: Any, values: list[Any], reads: list[int], gates: Gates, path: tuple[Any, ...]
) -> list[Any]:
    """Return the inputs of an equation, with other values of conditions and single numbers."""
    found = list(values)
    if equation.primitive.name == "select_n" and _is_free(reads[0]) and values[0].dtype == bool:
        found[0] = values[0] ^ (gates.number((*path, id(equation)), equation) > 0)
    meets = any(bits & ~OF_WHOLE for bits in reads)
    meets = meets or any(x.aval.size > 1 for x in equation.outvars)
    for place, (x, bits) in enumerate(zip(values, reads, strict=True)):
        is_number = is_inexact(x) or jnp.issubdtype(x.dtype, jnp.signedinteger)
        if meets and bits == OF_WHOLE and x.size == 1 and is_number:
            number = gates.number((*path, equation.invars[place]), equation)
            other = number if is_inexact(x) else 10 * number
            found[place] = jnp.where(number > 0, other.astype(x.dtype), x)
    return found


def _other_outputs(
    equation: Any, values: list[Any], outputs: Any, bits: int, gates: Gates, within: Any
) -> Any:
    """Return the outputs of an equation, with another value for a comparison and for a bound."""
    name, (first, *_) = equation.primitive.name, outputs
    if name in COMPARES and bits & OF_PARAMS:
        return [first ^ (gates.number(within, equation) > 0)]
    if name in (*_SWAPPED, "clamp") and (bits & OF_PARAMS or first.size > 1):
        of_clamp = lambda: values[0] + values[2] - first
        other = _SWAPPED[name].bind(*values) if name in _SWAPPED else of_clamp()
        return [jnp.where(gates.number(within, equation) > 0, other, first)]
    return outputs


@functools.cache
def _is_coarse(dtype: Any) -> bool:
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_float and jnp.finfo(dtype).bits < 32


def wide(x: Any) -> Any:
    """Cast a float to at least 32 bits; anything else stays as it is."""
    return x.astype(jnp.float32) if is_inexact(x) and _is_coarse(jnp.result_type(x)) else x
