"""What a step leaves equal on all shards, read from its jaxpr.

JAX's own types (``check_vma=True``) say it too, but refuse steps that are right: a loop whose
carry starts equal and ends different, a sum over groups. Here a step is traced without types, and
each value is followed from the inputs to the outputs with the mesh axes over which it may differ.
"""

import numbers
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from crossshard import _jax

Axes = frozenset[str]

_EQUAL: Axes = frozenset()

# After these every shard along the axes holds the same; after any other collective it may not.
_LEVELLING = {"psum", "pmax", "pmin", "all_gather"}


def differing_axes(sharded: ClosedJaxpr) -> list[Axes]:
    """Per output of a traced ``shard_map``, the mesh axes over which a shard's own may differ.

    Args:
      sharded: what ``jax.make_jaxpr`` gives for a function that is a shard_map and nothing else.
    """
    (equation,) = sharded.jaxpr.eqns
    mesh_axes = frozenset(equation.params["mesh"].axis_names)
    inputs = [_axes_of(spec) & mesh_axes for spec in equation.params["in_specs"]]
    return _Follow(mesh_axes).through(equation.params["jaxpr"], inputs)


def _axes_of(names: Any) -> Axes:
    """The axis names in a spec or a parameter, however nested; positions are no names."""
    if names is None or isinstance(names, numbers.Integral):
        return _EQUAL
    if isinstance(names, str):
        return frozenset([names])
    return _EQUAL.union(*map(_axes_of, names))


class _Follow:
    """Follows values through jaxprs; errs on the side of "differs"."""

    def __init__(self, mesh_axes: Axes):
        self._mesh_axes = mesh_axes

    def through(self, jaxpr: Any, inputs: Sequence[Axes]) -> list[Axes]:
        """The axes of a jaxpr's outputs, given those of its inputs."""
        jaxpr = _jax.opened(jaxpr)
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def axes(atom: Any) -> Axes:
            # Literals and constants are the same everywhere; a literal has no hash.
            return _EQUAL if hasattr(atom, "val") else known.get(atom, _EQUAL)

        for equation in jaxpr.eqns:
            outputs = self._of_equation(equation, [axes(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, outputs, strict=True))
        return [axes(atom) for atom in jaxpr.outvars]

    def _of_equation(self, equation: Any, inputs: list[Axes]) -> list[Axes]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self._of_scan(params, inputs)
        if name == "while":
            return self._of_while(params, inputs)
        if name == "cond":
            chosen = self._each([self.through(branch, inputs[1:]) for branch in params["branches"]])
            return [out | inputs[0] for out in chosen]
        inner = _jax.called(equation)
        if inner is not None:
            return self.through(inner, inputs)
        everything = _EQUAL.union(*inputs) | self._named_within(params)
        if any("Ref" in type(atom.aval).__name__ for atom in equation.invars):
            everything = self._mesh_axes
        over = _axes_of(params.get("axes", ())) | _axes_of(params.get("axis_name", ()))
        over &= self._mesh_axes
        if name in _LEVELLING and params.get("axis_index_groups") is None:
            return [everything - over] * len(equation.outvars)
        return [everything | over] * len(equation.outvars)

    def _of_scan(self, params: Any, inputs: list[Axes]) -> list[Axes]:
        first, carried = _jax.scan_parts(params)
        constants, carry = inputs[:first], inputs[first : first + carried]
        rest = inputs[first + carried :]
        while True:
            outputs = self.through(params["jaxpr"], [*constants, *carry, *rest])
            after = self._each([carry, outputs[: len(carry)]])
            if after == carry:
                return [*carry, *outputs[len(carry) :]]
            carry = after

    def _of_while(self, params: Any, inputs: list[Axes]) -> list[Axes]:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body = inputs[:first], inputs[first : first + second]
        carry = inputs[first + second :]
        while True:
            (going_on,) = self.through(params["cond_jaxpr"], [*of_test, *carry])
            body = self.through(params["body_jaxpr"], [*of_body, *carry])
            # Shards that leave the loop at different times leave with different values.
            after = [out | going_on for out in self._each([carry, body])]
            if after == carry:
                return carry
            carry = after

    @staticmethod
    def _each(alternatives: Sequence[Sequence[Axes]]) -> list[Axes]:
        return [_EQUAL.union(*axes) for axes in zip(*alternatives, strict=True)]

    def _named_within(self, params: Any) -> Axes:
        """The mesh axes that programs inside an equation not known here name anywhere."""
        found = _EQUAL
        for inner in jaxprs_in_params(params):
            for equation in _jax.opened(inner).eqns:
                names = equation.params.get("axes", ()), equation.params.get("axis_name", ())
                found |= _axes_of(names) | self._named_within(equation.params)
        return found & self._mesh_axes
