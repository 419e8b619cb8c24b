"""Splits a loss into what a sum over rows divides in it, also where that is 0, and the rest."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossshard import _jax
from crossshard.jaxprs.rewrite import evaluate
from crossshard.jaxprs.walk import CHECKPOINTS, Call, control_flow, opened

# The place of an equation: its number in a jaxpr, or that of a call, and its place in there.
Place = tuple[int, ...]


class Split(NamedTuple):
    """A loss that is a quotient and something else."""

    total: Any  # what is divided
    rest: Any  # what is added to the quotient


def places_of(jaxpr: Any, variables: Collection[Any]) -> dict[Place, Any]:
    """Return these variables by the places of the equations that return them, outside of loops.

    A variable of a function that is called twice is at two of them.
    """
    found = dict[Place, Any]()
    for number, equation in enumerate(opened(jaxpr).eqns):
        if equation.outvars and equation.outvars[0] in variables:
            found[number,] = equation.outvars[0]
        called = _called(equation)
        within = {} if called is None else places_of(called, variables)
        found |= {(number, *place): variable for place, variable in within.items()}
    return found


def split(jaxpr: Any, inputs: Sequence[Any], loss: int, at: Collection[Place]) -> list[Any]:
    """Return the outputs of a closed jaxpr, of which the loss is ``Split``.

    Args:
      jaxpr: the jaxpr.
      inputs: its inputs.
      loss: the number of its output that is linear in a quotient.
      at: the places of the equations that divide, and of those that compare the divisor with 0,
        to choose something else there.
    """

    def of(times: Any) -> tuple[Any, list[Any]]:
        found = _evaluate(jaxpr, inputs, at, times)
        return found[loss].changed, [_plain(x) for x in found]

    # It is linear, so that its derivative by what multiplies the total is what has the total.
    number = jnp.zeros((), jaxpr.out_avals[loss].dtype)
    rest, total, outputs = jax.jvp(of, (number,), (jnp.ones_like(number),), has_aux=True)
    outputs[loss] = Split(total, rest)
    return outputs


class _Both(NamedTuple):
    """A value, and what it is with ``times`` the total in the place of the quotient."""

    plain: Any
    changed: Any


def _plain(x: Any) -> Any:
    return x.plain if isinstance(x, _Both) else x


def _evaluate(jaxpr: Any, inputs: Sequence[Any], at: Collection[Place], times: Any) -> list[Any]:
    numbers = itertools.count()

    def apply(equation: Any, given: list[Any]) -> Sequence[Any]:
        number = next(numbers)
        within = [place[1:] for place in at if place[0] == number]
        if any(within):
            return _called_on(equation, given, within, times)
        found = _jax.bound(equation, list(map(_plain, given)))
        changed = [x.changed if isinstance(x, _Both) else x for x in given]
        if not within:
            is_plain = not any(isinstance(x, _Both) for x in given)
            return found if is_plain else list(map(_Both, found, _jax.bound(equation, changed)))
        if equation.primitive.name == "div":
            return [_Both(found[0], changed[0] * times.astype(found[0].dtype))]
        return [_Both(found[0], jnp.full_like(found[0], equation.primitive.name != "eq"))]

    return evaluate(jaxpr, inputs, apply)


def _called(equation: Any) -> Any:
    """Return the jaxpr that an equation only calls, if that may be evaluated in its place."""
    call, name = control_flow(equation), equation.primitive.name
    is_known = name in CHECKPOINTS or name in ("jit", "pjit")
    return _jax.closed(call.jaxpr) if isinstance(call, Call) and is_known else None


def _called_on(
    equation: Any, given: Sequence[Any], at: Collection[Place], times: Any
) -> Sequence[Any]:
    called = _called(equation)
    run = lambda given, times: _evaluate(called, given, at, times)
    if equation.primitive.name in CHECKPOINTS:
        kept = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        run = jax.checkpoint(run, **kept)
    with _jax.at_source_of(equation), equation.ctx.manager:
        return run(given, times)
