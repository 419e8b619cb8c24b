"""Rewrites of jaxprs: one evaluator, what it makes of a jaxpr, and fences for XLA.

A rewriting evaluates a jaxpr on values or on variables, and says of each equation what becomes of
it: the equations of a call in its place, none that was there before, some outputs alone.
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
from crossshard.jaxprs.walk import CHECKPOINTS, Call, constants, control_flow, jaxprs_within, opened


def evaluate(
    jaxpr: Any,
    inputs: Sequence[Any],
    on: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    consts: Sequence[Any] | None = None,
    literal: Callable[[Any], Any] = lambda atom: atom.val,
) -> list[Any]:
    """The outputs of a jaxpr.

    Args:
      jaxpr: the jaxpr, closed or open.
      inputs: values of its inputs, of any kind.
      on: returns the outputs of an equation, given its inputs.
      consts: values of its constants, if these are of another kind.
      literal: returns the value of a literal.
    """
    body = opened(jaxpr)
    values = dict(zip(body.invars, inputs, strict=True))
    consts = constants(jaxpr) if consts is None else consts
    values |= dict(zip(body.constvars, consts, strict=True))
    read = lambda atom: literal(atom) if isinstance(atom, Literal) else values[atom]
    for equation in body.eqns:
        found = on(equation, list(map(read, equation.invars)))
        values |= dict(zip(equation.outvars, found, strict=True))
    return list(map(read, body.outvars))


class Written:
    """Equations that are written down, with those of a call in place of it."""

    def __init__(
        self,
        emit: Callable[[Any], list[Any]] | None = None,
        keep: frozenset[str] = frozenset(),
    ):
        """Nothing is written down yet.

        Args:
          emit: writes an equation down in its own way, and returns its outputs.
          keep: the primitives whose calls stay as they are.
        """
        self.equations: list[Any] = []
        self.constants: dict[Any, Any] = {}  # the values of those that they read
        self._emit, self._keep = emit or self.add, keep

    def add(self, equation: Any) -> list[Any]:
        """Write an equation down; returns its outputs, which are new."""
        outputs = [Var(out.aval) for out in equation.outvars]
        self.equations.append(equation.replace(outvars=outputs))
        return outputs

    def of(self, jaxpr: Any, inputs: Sequence[Any], caller: Any = None) -> list[Any]:
        """Write down a closed jaxpr on these inputs; returns its outputs."""

        def on(equation: Any, given: list[Any]) -> list[Any]:
            source = equation.source_info
            # What JAX has traced before has no source, and takes its caller's.
            if source.traceback is None and caller is not None:
                source = caller.source_info
            call = None if equation.primitive.name in self._keep else control_flow(equation)
            if isinstance(call, Call):
                called = equation.replace(source_info=source)
                return self.of(_jax.closed(call.jaxpr), given, called)
            return self._emit(equation.replace(invars=given, source_info=source))

        pairs = zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
        own = [self._constant(*pair, is_new=caller is not None) for pair in pairs]
        return evaluate(jaxpr, inputs, on, consts=own, literal=lambda atom: atom)

    def closed(self, jaxpr: Any) -> Any:
        """Write down a closed jaxpr on its own inputs; returns all as such a jaxpr."""
        inputs = jaxpr.jaxpr.invars
        outputs = self.of(jaxpr, inputs)
        return _jax.with_equations(jaxpr, self.constants, inputs, outputs, self.equations)

    def _constant(self, variable: Any, value: Any, *, is_new: bool) -> Any:
        for known, other in self.constants.items():
            if other is value and is_new:
                return known
        own = Var(variable.aval) if is_new else variable
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
        if control_flow(equation) is not None:
            equation = _with_jaxprs(equation, without_repeats)
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
            atom if atom.aval.shape == shape else once(_broadcast(atom, shape, equation))[0]
            for atom in equation.invars
        ]
        return once(equation.replace(invars=given))

    written = Written(emit, CHECKPOINTS)
    return written.closed(jaxpr)


def _with_jaxprs(equation: Any, change: Callable[[Any], Any]) -> Any:
    """An equation in whose parameters each closed jaxpr is changed."""

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
    """An equation that broadcasts an atom to a shape, from where another equation is."""
    axes = range(len(shape) - atom.aval.ndim, len(shape))
    typed = jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    (found,) = jax.make_jaxpr(lambda x: lax.broadcast_in_dim(x, shape, axes))(typed).eqns
    return found.replace(invars=[atom], source_info=like.source_info)


def _key(equation: Any) -> Hashable | None:
    """The same for equations that compute the same; ``None`` if that is not known."""
    if jaxprs_within(equation):
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
    if not isinstance(atom, Literal):
        return atom
    value = np.asarray(atom.val)
    return str(atom.aval), value.tobytes()


def computed_once(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, which computes nothing twice."""
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    found = jaxpr_as_fun(without_repeats(_jax.without_unread(jaxpr)))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), found)


class Piece(NamedTuple):
    """A function of some inputs of a jaxpr."""

    run: Callable[..., list[Any]]  # the function
    taken: tuple[int, ...]  # the places of its inputs
    text: str  # the same for functions that compute the same from other inputs


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


# Fences for XLA: a loop of one turn, and a false that XLA cannot fold.


def opaque_false(count: jax.Array) -> jax.Array:
    """bool[]: a ``False`` that XLA cannot fold, from a count, which is never negative."""
    return count < 0


def in_loop(
    function: Callable[..., tuple[Any, Any]], carry: Any, *given: Any, skip: Any
) -> tuple[Any, Any]:
    """``function(carry, *given)`` in a while loop with one turn, or none if ``skip`` is set.

    XLA updates the arrays of the carry in place, where for CPUs it copies those that a select or a
    conditional may keep. It hoists nothing that is computed of what is given, and compiles the
    body apart from all else, so that its bits do not depend on that.

    Args:
      function: returns the carry as it is afterwards, with the same types, and other arrays.
      carry: arrays that the function reads and replaces.
      given: what it only reads.
      skip: bool[]. XLA leaves the loop out if it can tell that it runs; see ``opaque_false``.

    Returns:
      What the function returns; if it is skipped, the carry as it was, and zeros.
    """
    none = zeros(jax.eval_shape(function, carry, *given)[1])

    def turn(before: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        done, carry, _ = before
        if not given:
            return jnp.bool_(True), *function(carry)
        # Or XLA would compute before the loop what is the same in all turns.
        _, own = lax.optimization_barrier((done, given))
        return jnp.bool_(True), *computed_once(function, carry, *own)

    _, carry, others = lax.while_loop(lambda before: ~before[0], turn, (skip, carry, none))
    return carry, others


def zeros(types: Any) -> Any:
    """Zeros of these types."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)
