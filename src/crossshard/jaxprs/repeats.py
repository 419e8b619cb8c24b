"""Repeats: a jaxpr in which nothing is computed twice."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from crossshard import _jax
from crossshard.jaxprs.primitives import BINARY


def without_repeats(jaxpr: Any) -> Any:
    """A closed jaxpr that computes equal equations once, with what it calls written out.

    XLA merges them too, but before or after it has simplified them, as the number of devices is
    one or several, and may then simplify them differently. What ``jax.checkpoint`` computes again
    is left as it is.
    """
    constants = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    merged = _Merged(constants)
    outputs = merged.of(jaxpr, jaxpr.jaxpr.invars, None)
    return _jax.with_equations(jaxpr, constants, jaxpr.jaxpr.invars, outputs, merged.equations)


def computed_once(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, which computes nothing twice."""
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    found = _jax.as_function(without_repeats(_jax.without_unread(jaxpr)))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), found)


class _Merged:
    """The equations so far, none of them twice."""

    def __init__(self, constants: dict[Any, Any]):
        self.equations: list[Any] = []
        self._constants = constants
        self._known: dict[Hashable, list[Any]] = {}

    def of(self, jaxpr: Any, inputs: Sequence[Any], caller: Any) -> list[Any]:
        """The outputs of a closed jaxpr on these inputs."""
        values = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            own = variable if caller is None else self._constant(variable, value)
            values[variable] = own
        read = lambda atom: atom if _jax.is_literal(atom) else values[atom]
        for equation in jaxpr.jaxpr.eqns:
            given = list(map(read, equation.invars))
            source = equation.source_info
            if source.traceback is None and caller is not None:
                source = caller.source_info
            called = _jax.called(equation)
            if called is not None:
                found = self.of(called, given, equation.replace(source_info=source))
            else:
                found = self._once(self._whole(equation.replace(invars=given, source_info=source)))
            values |= dict(zip(equation.outvars, found, strict=True))
        return list(map(read, jaxpr.jaxpr.outvars))

    def _constant(self, variable: Any, value: Any) -> Any:
        for known, other in self._constants.items():
            if other is value:
                return known
        own = _jax.variable_like(variable)
        self._constants[own] = value
        return own

    def _whole(self, equation: Any) -> Any:
        """The equation with operands of its own shape, whose broadcasts are equations too."""
        if equation.primitive.name not in BINARY:
            return equation
        shape = equation.outvars[0].aval.shape
        given = [
            atom
            if atom.aval.shape == shape
            else self._once(_jax.broadcast_equation(atom, shape, equation))[0]
            for atom in equation.invars
        ]
        return equation.replace(invars=given)

    def _once(self, equation: Any) -> list[Any]:
        key = None if equation.effects else _key(equation)
        if key is not None and key in self._known:
            return self._known[key]
        outputs = [_jax.variable_like(out) for out in equation.outvars]
        new = equation.replace(outvars=outputs)
        if _jax.control_flow(equation) is not None:
            new = _jax.with_jaxprs(new, without_repeats)
        self.equations.append(new)
        if key is not None:
            self._known[key] = outputs
        return outputs


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
