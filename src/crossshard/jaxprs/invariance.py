"""Finds the mesh axes over which a step's outputs vary, from its jaxpr.

JAX's types (``check_vma=True``) also show them, but reject correct steps: a loop whose carry starts
invariant and ends varying, a sum over groups. Here a step is traced without types, and the axes
over which a value may vary are propagated from the inputs to the outputs.
"""

import numbers
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from crossshard import _jax
from crossshard.jaxprs.primitives import EQUALIZES
from crossshard.jaxprs.walk import Analysis, Equations, equations_within, follow

Axes = frozenset[str]

_INVARIANT: Axes = frozenset()


def varying_axes_of_outputs(sharded: ClosedJaxpr) -> Sequence[Axes]:
    """For each output of a traced ``shard_map``, the mesh axes over which it may vary.

    Args:
      sharded: the jaxpr of a function that is a single ``shard_map``.
    """
    (equation,) = sharded.jaxpr.eqns
    mesh_axes, in_specs, jaxpr = _jax.shard_map_parts(equation)
    inputs = [_names_in(spec) & mesh_axes for spec in in_specs]
    return follow(Variance(mesh_axes), [jaxpr], inputs)


def _names_in(names: Any) -> Axes:
    """The axis names in a nested spec or parameter; positions are not names."""
    if names is None or isinstance(names, numbers.Integral):
        return _INVARIANT
    if isinstance(names, str):
        return frozenset([names])
    return _INVARIANT.union(*map(_names_in, names))


class Variance(Analysis[Axes]):
    """The mesh axes over which a value may vary."""

    def __init__(self, mesh_axes: Axes):
        self._mesh_axes = mesh_axes

    def constant(self, values: Sequence[Any]) -> Axes:
        del values
        return _INVARIANT

    def join(self, facts: Sequence[Axes]) -> Axes:
        return _INVARIANT.union(*facts)

    def control(self, equations: Equations, decides: Axes) -> Axes:
        # Shards that take different branches or leave a loop at different times diverge.
        del equations
        return decides

    def transfer(self, equations: Equations, inputs: Sequence[Axes]) -> Sequence[Axes]:
        (equation,) = equations
        if any(map(_jax.is_ref, equation.invars)):
            varies = self._mesh_axes
        else:
            varies = self.join([*inputs, *map(self._named_by, equations_within(equation))])
        over = self._named_by(equation)
        out = varies - over if _equalizes(equation) else varies | over
        return [out] * len(equation.outvars)

    def _named_by(self, equation: Any) -> Axes:
        return _names_in(_jax.named_axes(equation)) & self._mesh_axes


def _equalizes(equation: Any) -> bool:
    """Whether an equation is a collective whose output is equal on all shards along its axes."""
    ungrouped = equation.params.get("axis_index_groups") is None
    return equation.primitive.name in EQUALIZES and ungrouped
