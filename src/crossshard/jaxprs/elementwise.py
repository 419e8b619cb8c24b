"""Checks whether an update is elementwise, so that each shard can update its slice alone.

The update is traced on full arrays and on one shard's slices, and the two jaxprs are compared. It
is elementwise if they match, and if every output element depends only on input elements at the
same position and on replicated values.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from crossshard import _jax
from crossshard.jaxprs.primitives import ELEMENTWISE
from crossshard.jaxprs.walk import Analysis, Equations, Mismatch, follow


class Slicing(enum.Enum):
    """How a value on slices stands to the one on full arrays."""

    SAME = "the same on all shards"
    UNIFORM = "one number at every position"
    SLICE = "a slice on each shard, each element computed from elements at its position"


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value whose elements depend on other positions, or on their own position.

    Attributes:
      reason: the operation that mixes them.
      source: its source line; empty if unknown.
    """

    reason: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


class Along(NamedTuple):
    """A slice along an axis: what is computed along other axes is the same on slices."""

    axis: int


Kind = Slicing | Along | Mixed


class DependsOnShape(Exception):
    """A literal differs between the two jaxprs, because it is computed from a shape."""


def is_elementwise(
    update: Callable[..., tuple[Any, Any]], wholes: tuple[Any, ...], slices: tuple[Any, ...]
) -> bool:
    """Whether ``why_not_elementwise`` finds nothing, in less time if it finds something."""
    whole, expected = jax.make_jaxpr(update)(*wholes), jax.tree.leaves(wholes[:2])
    # What mixes elements on full arrays mixes them on slices, on which it need not be traced then.
    if _obstacle(whole, whole, expected, _kinds(wholes, slices)) is not None:
        return False
    return why_not_elementwise(update, wholes, slices) is None


def why_not_elementwise(
    update: Callable[..., tuple[Any, Any]], wholes: tuple[Any, ...], slices: tuple[Any, ...]
) -> str | None:
    """The reason why an update cannot run on slices of its arrays, or ``None``.

    Args:
      update: from ``(params, state, …)`` to the new ``(params, state)``.
      wholes: its full arguments, pytrees with shapes and dtypes.
      slices: one shard's arguments; leaves of the full shape are replicated.

    Returns:
      A short reason with its source line.
    """
    whole = jax.make_jaxpr(update)(*wholes)
    try:
        part = jax.make_jaxpr(update)(*slices)
    except Exception as error:  # an optimizer may raise anything on slices
        return str(Mixed(_FAILS, _jax.source_of_error(error)))
    try:
        return _obstacle(whole, part, jax.tree.leaves(slices[:2]), _kinds(wholes, slices))
    except Mismatch as mismatch:
        source = "" if mismatch.equation is None else _jax.source_of(mismatch.equation)
        return str(Mixed(_DIFFERS, source))
    except DependsOnShape as found:
        return str(found)


COMPUTES_WITH_SHAPE = "it computes with the shape of a parameter"
_FAILS = "it cannot be traced on slices of the parameters"
_DIFFERS = "it computes something different on slices of the parameters"


def _kinds(wholes: Any, slices: Any) -> list[Kind]:
    return [
        Slicing.SAME if one.shape == other.shape else Slicing.SLICE
        for one, other in zip(*map(jax.tree.leaves, (wholes, slices)), strict=True)
    ]


def _obstacle(whole: Any, part: Any, expected: Sequence[Any], inputs: Sequence[Kind]) -> str | None:
    outputs = follow(Elementwise(), (whole, part), inputs)
    if len(outputs) != len(expected):
        return "its state changes its structure"
    for kind, before, after, was in zip(outputs, expected, part.out_avals, inputs, strict=False):
        if isinstance(kind, Mixed):
            return str(kind)
        if after.shape != before.shape or (kind is Slicing.SAME) != (was is Slicing.SAME):
            return "a new parameter or state array is sliced differently from the old one"
    return None


class Elementwise(Analysis[Kind]):
    """The kinds of values in the jaxpr on full arrays, compared with the one on slices."""

    def constant(self, values: Sequence[Any]) -> Kind:
        whole, part = values
        same = np.shape(whole) == np.shape(part) and bool(np.all(np.asarray(whole) == part))
        return Slicing.SAME if same else Mixed("a constant with the shape of a parameter")

    def literal(self, values: Sequence[Any], equation: Any) -> Kind:
        whole, part = values
        if not np.array_equal(whole, part, equal_nan=True):
            source = "" if equation is None else _jax.source_of(equation)
            raise DependsOnShape(Mixed(COMPUTES_WITH_SHAPE, source))
        return Slicing.SAME

    def join(self, facts: Sequence[Kind]) -> Kind:
        mixed = [kind for kind in facts if isinstance(kind, Mixed)]
        if mixed:
            return mixed[0]
        if all(kind is facts[0] for kind in facts):
            return facts[0]
        if Slicing.SAME in facts:
            return Mixed("an array that is full on one path and a slice on another")
        return Slicing.SLICE

    def control(self, equations: Equations, decides: Kind) -> Kind | None:
        if decides is Slicing.SAME:
            return None
        whole = equations[0]
        return Mixed(_CONTROL[whole.primitive.name], _jax.source_of(whole))

    def element(self, equations: Equations, fact: Kind) -> Kind:
        if fact is Slicing.SAME:
            return fact
        return Mixed(_CONTROL["scan"], _jax.source_of(equations[0]))

    def returned(
        self, equations: Equations, inputs: Sequence[Kind], outputs: Sequence[Kind]
    ) -> Sequence[Kind]:
        # A value without a source line, as in a jit that JAX has traced before, takes the call's.
        return [
            Mixed(fact.reason, _jax.source_of(equations[0]))
            if isinstance(fact, Mixed) and not fact.source
            else fact
            for fact in outputs
        ]

    def transfer(self, equations: Equations, inputs: Sequence[Kind]) -> Sequence[Kind]:
        whole, part = equations
        name, count = whole.primitive.name, len(whole.outvars)
        if name == "optimization_barrier":
            return inputs
        mixed = [kind for kind in inputs if isinstance(kind, Mixed)]
        if mixed or not count:  # a debug print has no outputs
            return mixed[:1] * count
        if all(kind is Slicing.SAME for kind in inputs):
            return [self._of_same(whole, part)] * count
        out, alike = whole.outvars[0].aval.shape, _jax.same_but_for_shapes(whole, part)
        in_place = all(
            atom.aval.shape == out or (kind is Slicing.SAME and atom.aval.shape == ())
            for atom, kind in zip(whole.invars, inputs, strict=True)
        )
        moves_nothing = len(inputs) == 1 and _jax.keeps_order(whole)
        if in_place and ((name in ELEMENTWISE and alike) or moves_nothing):
            return [Slicing.SLICE if Slicing.SLICE in inputs else Slicing.UNIFORM] * count
        return [Mixed(f"{name} over a full parameter", _jax.source_of(whole))] * count

    @staticmethod
    def _of_same(whole: Any, part: Any) -> Kind:
        shapes_agree = all(
            one.aval.shape == other.aval.shape
            for one, other in zip(whole.outvars, part.outvars, strict=True)
        )
        if shapes_agree and _jax.same_but_for_shapes(whole, part):
            return Slicing.SAME
        name = whole.primitive.name
        if name == "broadcast_in_dim" and whole.invars[0].aval.shape == ():
            return Slicing.UNIFORM
        return Mixed(f"{name} creates an array of a parameter's shape", _jax.source_of(whole))


_CONTROL = {
    "cond": "a branch that depends on the elements of a parameter",
    "while": "a loop whose length depends on the elements of a parameter",
    "scan": "a scan along an axis of a parameter",
}
