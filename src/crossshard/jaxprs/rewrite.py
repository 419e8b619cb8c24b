"""Rewrites of jaxprs: one evaluator, and what it makes of a jaxpr.

A rewriting evaluates a jaxpr on values or on variables, and says of each equation what becomes of
it: the equations of a call in its place, none that was there before, some outputs alone.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from crossshard import _jax
from crossshard.jaxprs.primitives import BINARY


def evaluate(
    jaxpr: Any,
    inputs: Sequence[Any],
    on: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    constants: Sequence[Any] | None = None,
    literal: Callable[[Any], Any] = lambda atom: atom.val,
) -> list[Any]:
    """The outputs of a jaxpr.

    Args:
      jaxpr: the jaxpr, closed or open.
      inputs: values of its inputs, of any kind.
      on: returns the outputs of an equation, given its inputs.
      constants: values of its constants, if these are of another kind.
      literal: returns the value of a literal.
    """
    opened = _jax.opened(jaxpr)
    values = dict(zip(opened.invars, inputs, strict=True))
    constants = _jax.constants(jaxpr) if constants is None else constants
    values |= dict(zip(opened.constvars, constants, strict=True))
    read = lambda atom: literal(atom) if _jax.is_literal(atom) else values[atom]
    for equation in opened.eqns:
        found = on(equation, list(map(read, equation.invars)))
        values |= dict(zip(equation.outvars, found, strict=True))
    return list(map(read, opened.outvars))


def _called(equation: Any) -> Any:
    call = _jax.control_flow(equation)
    return _jax.closed(call.jaxpr) if isinstance(call, _jax.Call) else None


class Written:
    """Equations that are written down, with those of a call in place of it.

    Attributes:
      equations: these.
      constants: the values of the constants that they read.
    """

    def __init__(
        self,
        opens: Callable[[Any], Any] = _called,
        emit: Callable[[Any], list[Any]] | None = None,
    ):
        """Nothing is written down yet.

        Args:
          opens: returns the closed jaxpr that is to stand in the place of an equation; else
            ``None``. That of any call if it is not given.
          emit: writes an equation down in its own way, and returns its outputs.
        """
        self.equations: list[Any] = []
        self.constants: dict[Any, Any] = {}
        self._opens, self._emit = opens, emit or self.add

    def add(self, equation: Any) -> list[Any]:
        """Write an equation down; returns its outputs, which are new."""
        outputs = [_jax.variable_like(out) for out in equation.outvars]
        self.equations.append(equation.replace(outvars=outputs))
        return outputs

    def of(self, jaxpr: Any, inputs: Sequence[Any], caller: Any = None) -> list[Any]:
        """Write down a closed jaxpr on these inputs; returns its outputs."""

        def on(equation: Any, given: list[Any]) -> list[Any]:
            source = equation.source_info
            # What JAX has traced before has no source, and takes its caller's.
            if source.traceback is None and caller is not None:
                source = caller.source_info
            called = self._opens(equation)
            if called is not None:
                return self.of(called, given, equation.replace(source_info=source))
            return self._emit(equation.replace(invars=given, source_info=source))

        pairs = zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
        own = [self._constant(*pair, is_new=caller is not None) for pair in pairs]
        return evaluate(jaxpr, inputs, on, constants=own, literal=lambda atom: atom)

    def closed(self, jaxpr: Any) -> Any:
        """Write down a closed jaxpr on its own inputs; returns all as such a jaxpr."""
        inputs = jaxpr.jaxpr.invars
        outputs = self.of(jaxpr, inputs)
        return _jax.with_equations(jaxpr, self.constants, inputs, outputs, self.equations)

    def _constant(self, variable: Any, value: Any, *, is_new: bool) -> Any:
        for known, other in self.constants.items():
            if other is value and is_new:
                return known
        own = _jax.variable_like(variable) if is_new else variable
        self.constants[own] = value
        return own


def flat(jaxpr: Any) -> Any:
    """A closed jaxpr with what it calls written out; branches and loops stay as they are."""
    return Written().closed(jaxpr)


def without_repeats(jaxpr: Any) -> Any:
    """A closed jaxpr that computes equal equations once, with what it calls written out.

    XLA merges them too, but before or after it has simplified them, as the number of devices is
    one or several, and may then simplify them differently. What ``jax.checkpoint`` computes again
    is left as it is.
    """
    known: dict[Hashable, list[Any]] = {}

    def once(equation: Any) -> list[Any]:
        key = None if equation.effects else _key(equation)
        if key is not None and key in known:
            return known[key]
        if _jax.control_flow(equation) is not None:
            equation = _jax.with_jaxprs(equation, without_repeats)
        outputs = written.add(equation)
        if key is not None:
            known[key] = outputs
        return outputs

    def emit(equation: Any) -> list[Any]:
        """Once, with operands of its own shape, whose broadcasts are equations too."""
        if equation.primitive.name not in BINARY:
            return once(equation)
        shape = equation.outvars[0].aval.shape
        given = [
            atom
            if atom.aval.shape == shape
            else once(_jax.broadcast_equation(atom, shape, equation))[0]
            for atom in equation.invars
        ]
        return once(equation.replace(invars=given))

    written = Written(_jax.called, emit)
    return written.closed(jaxpr)


def _key(equation: Any) -> Hashable | None:
    """The same for equations that compute the same; ``None`` if that is not known."""
    if _jax.jaxprs_within(equation):
        return None
    key = (
        equation.primitive,
        tuple(map(_of_atom, equation.invars)),
        tuple(sorted(equation.params.items())),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _of_atom(atom: Any) -> Hashable:
    if not _jax.is_literal(atom):
        return atom
    value = np.asarray(atom.val)
    return str(atom.aval), value.tobytes()


def computed_once(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, which computes nothing twice."""
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    found = _jax.as_function(without_repeats(_jax.without_unread(jaxpr)))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), found)


class Piece(NamedTuple):
    """A function of some inputs of a jaxpr.

    Attributes:
      run: the function.
      taken: the places of its inputs.
      text: the same for functions that compute the same from other inputs.
    """

    run: Callable[..., list[Any]]
    taken: tuple[int, ...]
    text: str


class Pieces:
    """The pieces of a closed jaxpr; each is found in the time that it takes to compute it."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr
        self._constants = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        self._equations = jaxpr.jaxpr.eqns
        self._maker = {
            out: place for place, each in enumerate(self._equations) for out in each.outvars
        }
        self._known: dict[tuple[int, ...], Piece] = {}

    def of(self, outputs: Sequence[int]) -> Piece:
        """What computes the outputs at these places, in their order."""
        key = tuple(outputs)
        if key not in self._known:
            self._known[key] = self._found(key)
        return self._known[key]

    def _found(self, outputs: tuple[int, ...]) -> Piece:
        wanted = [self._jaxpr.jaxpr.outvars[place] for place in outputs]
        places, left = set[int](), list(wanted)
        while left:
            atom = left.pop()
            place = None if _jax.is_literal(atom) else self._maker.get(atom)
            if place is not None and place not in places:
                places.add(place)
                left += self._equations[place].invars
        equations = [self._equations[place] for place in sorted(places)]
        inputs = self._jaxpr.jaxpr.invars
        jaxpr = _jax.with_equations(self._jaxpr, self._constants, inputs, wanted, equations)
        pruned, taken = _jax.pruned(jaxpr, [True] * len(wanted))
        kept = tuple(place for place, each in enumerate(taken) if each)
        return Piece(_jax.as_function(pruned), kept, str(pruned.jaxpr))
