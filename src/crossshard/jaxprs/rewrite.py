"""Rewrites of jaxprs, the evaluator that they share, and fences that XLA does not optimize across.

A rewrite evaluates a jaxpr on values or on variables, and decides what becomes of each equation: it
replaces a call by the equations of what is called, drops repeated equations, or keeps only what
some outputs need.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from crossshard import _jax
from crossshard.jaxprs.primitives import BINARY
from crossshard.jaxprs.walk import (
    CALLS,
    CHECKPOINTS,
    Call,
    constants,
    control_flow,
    jaxprs_within,
    opened,
)


def evaluate(
    jaxpr: Any,
    inputs: Sequence[Any],
    apply: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    consts: Sequence[Any] | None = None,
    literal: Callable[[Any], Any] = lambda atom: atom.val,
) -> list[Any]:
    """Evaluate a jaxpr, and return its outputs.

    Args:
      jaxpr: the jaxpr, closed or open.
      inputs: values of its inputs, of any kind.
      apply: returns the outputs of an equation, given its inputs.
      consts: values of its constants, if these are of another kind.
      literal: returns the value of a literal.
    """
    body = opened(jaxpr)
    values = dict(zip(body.invars, inputs, strict=True))
    consts = constants(jaxpr) if consts is None else consts
    values |= dict(zip(body.constvars, consts, strict=True))
    read = lambda atom: literal(atom) if isinstance(atom, Literal) else values[atom]
    for equation in body.eqns:
        found = apply(equation, list(map(read, equation.invars)))
        values |= dict(zip(equation.outvars, found, strict=True))
    return list(map(read, body.outvars))


class Writer:
    """Writes a list of equations, in which each call is replaced by the equations it runs."""

    def __init__(
        self,
        emit: Callable[[Any], list[Any]] | None = None,
        keep: frozenset[str] = frozenset(),
    ):
        """Start with no equations.

        Args:
          emit: writes an equation in its own way, and returns its outputs.
          keep: the primitives whose calls stay as they are.
        """
        self.equations: list[Any] = []
        self.constants: dict[Any, Any] = {}  # the values of the constants that they read
        self._emit, self._keep = emit or self.add, keep

    def add(self, equation: Any) -> list[Any]:
        """Write an equation; return its outputs, which are new variables."""
        outputs = [Var(out.aval) for out in equation.outvars]
        self.equations.append(equation.replace(outvars=outputs))
        return outputs

    def write(self, jaxpr: Any, inputs: Sequence[Any], caller: Any = None) -> list[Any]:
        """Write a closed jaxpr on these inputs; return its outputs."""

        def apply(equation: Any, given: list[Any]) -> list[Any]:
            source = equation.source_info
            # A function that JAX has traced before has no source lines, and takes its caller's.
            if source.traceback is None and caller is not None:
                source = caller.source_info
            call = None if equation.primitive.name in self._keep else control_flow(equation)
            if isinstance(call, Call):
                called = equation.replace(source_info=source)
                return self.write(_jax.closed(call.jaxpr), given, called)
            return self._emit(equation.replace(invars=given, source_info=source))

        pairs = zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
        own = [self._constant(*pair, is_new=caller is not None) for pair in pairs]
        return evaluate(jaxpr, inputs, apply, consts=own, literal=lambda atom: atom)

    def closed(self, jaxpr: Any) -> Any:
        """Write a closed jaxpr on its own inputs; return all equations as a closed jaxpr."""
        inputs = jaxpr.jaxpr.invars
        outputs = self.write(jaxpr, inputs)
        return _jax.with_equations(jaxpr, self.constants, inputs, outputs, self.equations)

    def _constant(self, variable: Any, value: Any, *, is_new: bool) -> Any:
        for known, other in self.constants.items():
            if other is value and is_new:
                return known
        own = Var(variable.aval) if is_new else variable
        self.constants[own] = value
        return own


def inlined(jaxpr: Any) -> Any:
    """Inline all calls of a closed jaxpr; branches and loops stay as they are."""
    return Writer().closed(jaxpr)


def without_repeats(jaxpr: Any) -> Any:
    """Compute equal equations of a closed jaxpr once, and inline its calls.

    XLA merges equal equations too, but on several devices in another order relative to its other
    simplifications than on one, and may then simplify them differently. What ``jax.checkpoint``
    computes again is left as it is.
    """
    known: dict[Hashable, list[Any]] = {}

    def once(equation: Any) -> list[Any]:
        key = None if equation.effects else _equation_key(equation)
        if key is not None and key in known:
            return known[key]
        if control_flow(equation) is not None:
            equation = _with_jaxprs(equation, without_repeats)
        outputs = writer.add(equation)
        if key is not None:
            known[key] = outputs
        return outputs

    def emit(equation: Any) -> list[Any]:
        """Write an equation once, with its operands broadcast to its shape by equations."""
        if equation.primitive.name not in BINARY:
            return once(equation)
        shape = equation.outvars[0].aval.shape
        given = [
            atom if atom.aval.shape == shape else once(_broadcast(atom, shape, equation))[0]
            for atom in equation.invars
        ]
        return once(equation.replace(invars=given))

    writer = Writer(emit, CHECKPOINTS)
    return writer.closed(jaxpr)


def without_checkpoints(jaxpr: Any) -> Any:
    """Inline every ``jax.checkpoint`` of a closed jaxpr, so that autodiff recomputes nothing."""

    def emit(equation: Any) -> list[Any]:
        return writer.add(_with_jaxprs(equation, without_checkpoints))

    writer = Writer(emit, CALLS - CHECKPOINTS)
    return writer.closed(jaxpr)


def _with_jaxprs(equation: Any, change: Callable[[Any], Any]) -> Any:
    """Return an equation with each closed jaxpr among its parameters changed."""

    def one(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(one, value))
        if isinstance(value, ClosedJaxpr):
            return change(value)
        if isinstance(value, Jaxpr) and not value.constvars:
            return change(_jax.closed(value)).jaxpr
        return value

    return equation.replace(params={name: one(x) for name, x in equation.params.items()})


def _broadcast(atom: Any, shape: tuple[int, ...], like: Any) -> Any:
    """Return an equation that broadcasts an atom to a shape, at the source line of ``like``."""
    axes = range(len(shape) - atom.aval.ndim, len(shape))
    typed = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    (found,) = jax.make_jaxpr(lambda x: lax.broadcast_in_dim(x, shape, axes))(typed).eqns
    return found.replace(invars=[atom], source_info=like.source_info)


def _equation_key(equation: Any) -> Hashable | None:
    """Return a key that is equal for equations that compute the same; ``None`` if unknown."""
    if jaxprs_within(equation):
        return None
    key = (
        equation.primitive,
        tuple(map(_atom_key, equation.invars)),
        tuple(sorted(equation.params.items())),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _atom_key(atom: Any) -> Hashable:
    if not isinstance(atom, Literal):
        return atom
    value = np.asarray(atom.val)
    return str(atom.aval), value.tobytes()


def computed_once(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function so that it computes nothing twice, and return what it returns."""
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    found = jaxpr_as_fun(without_repeats(_jax.without_unread(jaxpr)))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), found)


class Piece(NamedTuple):
    """A function that computes some outputs of a jaxpr from some of its inputs."""

    run: Callable[..., list[Any]]  # the function
    taken: tuple[int, ...]  # the places of its inputs in the jaxpr
    text: str  # equal for functions that do the same with other inputs


class Pieces:
    """The pieces of a closed jaxpr; finding one takes time in proportion to its equations."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr
        self._constants = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        self._equations = jaxpr.jaxpr.eqns
        self._maker = {
            out: place for place, each in enumerate(self._equations) for out in each.outvars
        }
        self._known: dict[tuple[int, ...], Piece] = {}

    def of(self, outputs: Sequence[int]) -> Piece:
        """Return the piece that computes the outputs at these places, in this order."""
        key = tuple(outputs)
        if key not in self._known:
            self._known[key] = self._found(key)
        return self._known[key]

    def _found(self, outputs: tuple[int, ...]) -> Piece:
        wanted = [self._jaxpr.jaxpr.outvars[place] for place in outputs]
        places, left = set[int](), list(wanted)
        while left:
            atom = left.pop()
            place = None if isinstance(atom, Literal) else self._maker.get(atom)
            if place is not None and place not in places:
                places.add(place)
                left += self._equations[place].invars
        equations = [self._equations[place] for place in sorted(places)]
        inputs = self._jaxpr.jaxpr.invars
        jaxpr = _jax.with_equations(self._jaxpr, self._constants, inputs, wanted, equations)
        pruned, taken = _jax.pruned(jaxpr, [True] * len(wanted))
        kept = tuple(place for place, each in enumerate(taken) if each)
        return Piece(jaxpr_as_fun(pruned), kept, str(pruned.jaxpr))


# Fences for XLA: a loop with one iteration, and a ``False`` that XLA cannot fold.


def opaque_false(count: jax.Array) -> jax.Array:
    """Return a ``False``, bool[], that XLA cannot fold, from a count, which is never negative."""
    return count < 0


def in_loop(
    function: Callable[..., tuple[Any, Any]], carry: Any, *given: Any, skip: Any
) -> tuple[Any, Any]:
    """Run ``function(carry, *given)`` in a while loop with one iteration; none if ``skip`` is set.

    XLA updates the arrays of the carry in place; on CPUs it copies arrays that a select or a
    conditional may keep. It hoists nothing that depends on ``given`` out of the loop, and compiles
    the body apart from all else, so that its bits do not depend on the code around it.

    Args:
      function: returns the new carry, with the same types, and other arrays.
      carry: arrays that the function reads and replaces.
      given: what it only reads.
      skip: bool[]. XLA removes the loop if it can tell that it runs; see ``opaque_false``.

    Returns:
      What the function returns; if it is skipped, the carry as it was, and zeros.
    """
    none = zeros(jax.eval_shape(function, carry, *given)[1])

    def turn(before: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        done, carry, _ = before
        if not given:
            return jnp.bool_(True), *function(carry)
        # Without this, XLA would hoist what is the same in all iterations.
        _, own = lax.optimization_barrier((done, given))
        return jnp.bool_(True), *computed_once(function, carry, *own)

    _, carry, others = lax.while_loop(lambda before: ~before[0], turn, (skip, carry, none))
    return carry, others


def zeros(types: Any) -> Any:
    """Return zeros of these types."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)
