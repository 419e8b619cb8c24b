"""Splits a loss into what a sum over rows divides in it, also where that is 0, and the rest."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossshard import _jax
from crossshard.jaxprs.rewrite import evaluate
from crossshard.jaxprs.row_facts import is_inexact_type
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
    outputs = _evaluate(jaxpr, inputs, at)
    found = outputs[loss]
    outputs = [x.plain if isinstance(x, _Parts) else x for x in outputs]
    outputs[loss] = Split(found.total, found.rest)
    return outputs


class _Parts(NamedTuple):
    """A value, and what it is made of: linear in quotients, or a condition of a choice."""

    plain: Any
    rest: Any  # without the quotients; of a condition: where anything counts
    total: Any  # the quotients, before they are divided; ``None`` of a condition


def _evaluate(jaxpr: Any, inputs: Sequence[Any], at: Collection[Place]) -> list[Any]:
    numbers = itertools.count()

    def apply(equation: Any, given: list[Any]) -> Sequence[Any]:
        number, has_parts = next(numbers), any(isinstance(x, _Parts) for x in given)
        within = [place[1:] for place in at if place[0] == number]
        called = _called(equation)
        if called is not None and (has_parts or within):
            return _called_on(equation, called, given, within)
        found = _jax.bound(equation, [x.plain if isinstance(x, _Parts) else x for x in given])
        if not within:
            return list(map(_Parts, found, *_linear(equation, given))) if has_parts else found
        if equation.primitive.name == "div":
            total = given[0].rest if isinstance(given[0], _Parts) else given[0]
            return [_Parts(found[0], jnp.zeros_like(found[0]), total)]
        chooses = jnp.full_like(found[0], equation.primitive.name != "eq")
        return [_Parts(found[0], chooses, None)]

    return evaluate(jaxpr, inputs, apply)


def _linear(equation: Any, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return an equation's outputs without the quotients, and its derivatives along these."""
    rests = [x.rest if isinstance(x, _Parts) else x for x in given]
    totals = {
        place: x.total
        for place, x in enumerate(given)
        if isinstance(x, _Parts) and x.total is not None
    }
    if not totals:
        rest = _jax.bound(equation, rests)
        return rest, [jnp.zeros_like(x) if is_inexact_type(x.dtype) else None for x in rest]
    if equation.primitive.name == "stop_gradient":
        return _jax.bound(equation, rests), [jax.lax.stop_gradient(totals[0])]

    def run(values: dict[int, Any]) -> list[Any]:
        return _jax.bound(equation, [values.get(place, x) for place, x in enumerate(rests)])

    return jax.jvp(run, ({place: rests[place] for place in totals},), (totals,))


def _called(equation: Any) -> Any:
    """Return the jaxpr that an equation only calls, if that may be evaluated in its place."""
    call, name = control_flow(equation), equation.primitive.name
    is_known = name in CHECKPOINTS or name in ("jit", "pjit")
    return _jax.closed(call.jaxpr) if isinstance(call, Call) and is_known else None


def _called_on(
    equation: Any, called: Any, given: Sequence[Any], at: Collection[Place]
) -> Sequence[Any]:
    run = lambda given: _evaluate(called, given, at)
    if equation.primitive.name in CHECKPOINTS:
        kept = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        run = jax.checkpoint(run, **kept)
    with _jax.at_source_of(equation), equation.ctx.manager:
        return run(given)
