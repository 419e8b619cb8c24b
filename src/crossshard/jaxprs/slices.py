"""Which values of an update each shard can compute from slices of the update's arguments.

The update is traced on full arrays and on one shard's slices, and the two jaxprs are compared. The
update is elementwise if they match, and if every output element depends only on input elements at
the same position and on replicated values. An update may also treat each matrix of a stack alone:
then it can run on slices along the axis of the stack, if all operations are along other axes.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from crossshard import _jax
from crossshard._hash import key_data
from crossshard.jaxprs.primitives import ALONG_ONE, ELEMENTWISE, OF_MATRICES, REDUCTIONS
from crossshard.jaxprs.walk import Analysis, Equations, Mismatch, are_alike, follow, has_effect


class Slicing(enum.Enum):
    """How a value on slices relates to the value on full arrays."""

    SAME = "the same on all shards"
    UNIFORM = "one number at every position"
    SLICE = "a slice on each shard, each element computed from elements at its position"


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value whose elements depend on other positions, or on their own position."""

    reason: str  # the operation that mixes them
    source: str = ""  # its source line; empty if unknown

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


class Along(NamedTuple):
    """A slice along an axis: what is computed along other axes is the same on slices."""

    axis: int


Kind = Slicing | Along | Mixed


def is_elementwise(
    update: Callable[..., tuple[Any, Any]], wholes: tuple[Any, ...], slices: tuple[Any, ...]
) -> bool:
    """Return whether ``why_not_elementwise`` finds no reason, in less time if there is one."""
    whole, expected = jax.make_jaxpr(update)(*wholes), jax.tree.leaves(wholes[:2])
    # An update that mixes elements of full arrays mixes those of slices: no second trace is needed.
    if _obstacle(whole, whole, expected, _kinds(wholes, slices)) is not None:
        return False
    return why_not_elementwise(update, wholes, slices) is None


def why_not_elementwise(
    update: Callable[..., tuple[Any, Any]], wholes: tuple[Any, ...], slices: tuple[Any, ...]
) -> str | None:
    """Return the reason why an update cannot run on slices of its arrays, or ``None``.

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
        return str(Mixed(FAILS, _jax.source_of_error(error)))
    try:
        return _obstacle(whole, part, jax.tree.leaves(slices[:2]), _kinds(wholes, slices))
    except Mismatch as mismatch:
        source = "" if mismatch.equation is None else _jax.source_of(mismatch.equation)
        return str(Mixed(DIFFERS, source))


def _kinds(wholes: Any, slices: Any) -> list[Kind]:
    return [
        Slicing.SAME if one.shape == other.shape else Slicing.SLICE
        for one, other in zip(*map(jax.tree.leaves, (wholes, slices)), strict=True)
    ]


_WITH_SHAPE = "it computes with the shape of a parameter"
FAILS = "it cannot be traced on slices of the parameters"
DIFFERS = "it computes something different on slices of the parameters"


def _obstacle(whole: Any, part: Any, expected: Sequence[Any], inputs: Sequence[Kind]) -> str | None:
    outputs = follow(Slices(), (whole, part), inputs)
    if len(outputs) != len(expected):
        return "its state changes its structure"
    for kind, before, after, was in zip(outputs, expected, part.out_avals, inputs, strict=False):
        if isinstance(kind, Mixed):
            return str(kind)
        if after.shape != before.shape or (kind is Slicing.SAME) != (was is Slicing.SAME):
            return "a new parameter or state array is sliced differently from the old one"
    return None


class Slices(Analysis[Kind]):
    """The kinds of values in the jaxpr on full arrays, compared with the one on slices.

    Args:
      of_leaves: whether slices may be along an axis, and only arrays of one leaf meet, which are
        all split alike.
    """

    def __init__(self, *, of_leaves: bool = False):
        self._of_leaves = of_leaves

    def constant(self, values: Sequence[Any]) -> Kind:
        with _jax.outside_of_traces():  # a comparison would be traced, and so would a key's data
            whole, part = (key_data(x) if isinstance(x, jax.Array) else x for x in values)
            same = np.shape(whole) == np.shape(part) and bool(np.all(np.asarray(whole) == part))
        return Slicing.SAME if same else Mixed("a constant with the shape of a parameter")

    def literal(self, values: Sequence[Any], equation: Any) -> Kind:
        if np.array_equal(values[0], values[1], equal_nan=True):
            return Slicing.SAME
        return Mixed(_WITH_SHAPE, "" if equation is None else _jax.source_of(equation))

    def join(self, facts: Sequence[Kind]) -> Kind:
        mixed: list[Kind] = [kind for kind in facts if isinstance(kind, Mixed)]
        # An array of one number is a slice of any kind.
        kinds = [kind for kind in facts if kind is not Slicing.UNIFORM]
        if mixed or len(set(kinds)) < 2:
            return [*mixed, *kinds, Slicing.UNIFORM][0]
        if Slicing.SAME in kinds:
            return Mixed("an array that is full on one path and a slice on another")
        return Mixed("an array that is sliced in one way on one path and in another on another")

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
        # A function that JAX has traced before has no source lines, and takes the call's.
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
        if any(isinstance(kind, Along) for kind in inputs):
            return self._along(whole, part, inputs)
        if set(inputs) <= {Slicing.SAME}:
            return [self._kind_of_same(whole, part)] * count
        given, out = list(zip(whole.invars, inputs, strict=True)), whole.outvars[0].aval
        is_computed = name in ELEMENTWISE and same_but_for_shapes(whole, part)
        if Slicing.SLICE not in inputs:
            alone = (kind is Slicing.UNIFORM or atom.aval.size == 1 for atom, kind in given)
            if is_computed and all(alone):
                return [Slicing.UNIFORM] * count
            if name != "broadcast_in_dim" and _shapes(whole) == _shapes(part):
                return [self._kind_of_same(whole, part)] * count
        elif self._of_leaves and name == "reshape" and out.ndim == 1 and _keeps_order(whole):
            # All arrays of a leaf are split alike, so their elements keep the same positions.
            return [Slicing.SLICE]
        in_place = all(
            atom.aval.shape == out.shape or (kind is Slicing.SAME and atom.aval.shape == ())
            for atom, kind in given
        )
        if in_place and (is_computed or (len(inputs) == 1 and _keeps_order(whole))):
            return [Slicing.SLICE if Slicing.SLICE in inputs else Slicing.UNIFORM] * count
        return [Mixed(f"{name} over a full parameter", _jax.source_of(whole))] * count

    def _kind_of_same(self, whole: Any, part: Any) -> Kind:
        """Return the kind of the output if all inputs are the same on all shards."""
        if has_effect(whole):
            reason = f"{whole.primitive.name}, which has an effect"
            return Mixed(reason, _jax.source_of(whole))
        name, out = whole.primitive.name, whole.outvars[0].aval
        is_broadcast = name == "broadcast_in_dim"
        if self._of_leaves and is_broadcast:
            given = whole.invars[0].aval
            if given.size == 1 < out.size:
                return Slicing.UNIFORM
            axis = axis_of_slices(out.shape, part.outvars[0].aval.shape)
            at = whole.params["broadcast_dimensions"]
            if axis is not None and (axis not in at or given.shape[at.index(axis)] == 1):
                return Along(axis)
        alike = same_but_for_shapes(whole, part)
        if alike and _shapes(whole)[len(whole.invars) :] == _shapes(part)[len(part.invars) :]:
            return Slicing.SAME
        if is_broadcast and whole.invars[0].aval.shape == ():
            return Slicing.UNIFORM
        return Mixed(f"{name} creates an array of a parameter's shape", _jax.source_of(whole))

    def _along(self, whole: Any, part: Any, inputs: Sequence[Kind]) -> Sequence[Kind]:
        try:
            axes = axes_after(whole, part, inputs)
        except ValueError:
            axes = None
        outs = zip(whole.outvars, part.outvars, strict=True)
        grown = [axis_of_slices(one.aval.shape, other.aval.shape) for one, other in outs]
        if axes is None or grown != list(axes):
            reason = f"{whole.primitive.name} over the stack of a parameter"
            return [Mixed(reason, _jax.source_of(whole))] * len(whole.outvars)
        return [Along(axis) for axis in axes]


_CONTROL = {
    "cond": "a branch that depends on the elements of a parameter",
    "while": "a loop whose length depends on the elements of a parameter",
    "scan": "a scan along an axis of a parameter",
}


def _shapes(equation: Any) -> list[tuple[int, ...]]:
    return [atom.aval.shape for atom in (*equation.invars, *equation.outvars)]


# Parameters about the shape or sharding of an array, not about the computation.
_OF_SHAPE = frozenset({"shape", "sharding", "broadcast_dimensions", "out_sharding"})


def same_but_for_shapes(one: Any, other: Any) -> bool:
    """Return whether two equations of one primitive are equal except for the shapes of arrays."""
    return are_alike(one, other, _OF_SHAPE)


def _keeps_order(equation: Any) -> bool:
    """Return whether an equation only reshapes or broadcasts, and keeps the order of elements."""
    reshapes = equation.primitive.name in ("broadcast_in_dim", "reshape")
    return reshapes and equation.params.get("dimensions") is None


def axis_of_slices(whole: Sequence[int], part: Sequence[int]) -> int | None:
    """Return the axis in which two shapes differ; ``None`` unless it is the only one."""
    if len(whole) != len(part):
        return None
    differ = [axis for axis, pair in enumerate(zip(whole, part, strict=True)) if len(set(pair)) > 1]
    return differ[0] if len(differ) == 1 else None


def axes_after(whole: Any, part: Any, inputs: Sequence[Kind]) -> Sequence[int] | None:
    """Return the axis of the slices in each output; ``None`` if the equation mixes slices."""
    name, outs = whole.primitive.name, len(whole.outvars)
    if name == "dot_general":
        return _axis_of_product(whole, inputs) if same_but_for_shapes(whole, part) else None
    given = [(atom.aval, kind) for atom, kind in zip(whole.invars, inputs, strict=True)]
    along = [(x.shape, kind.axis) for x, kind in given if isinstance(kind, Along)]
    if len({axis for _, axis in along}) != 1:
        return None
    shape, axis = along[0]
    if not _parameters_match(whole, part, axis):
        return None
    others = [
        x
        for x, kind in given
        if not (isinstance(kind, Along) or kind is Slicing.UNIFORM or x.size == 1)
    ]
    if name in ELEMENTWISE:
        # An input that is no slice must be the same at every position along the axis.
        alike = all(x.ndim == len(shape) and x.shape[axis] == 1 for x in others)
        return [axis] if alike else None
    after = None if others else _axis_after(whole, axis, shape)
    return None if after is None else [after] * outs


def _axis_after(whole: Any, axis: int, shape: Sequence[int]) -> int | None:
    """Return the axis of slices after an equation whose inputs are all slices of this shape.

    ``None`` if the equation mixes them.
    """
    name, params, out = whole.primitive.name, whole.params, whole.outvars[0].aval
    stays: bool
    match name:
        case "transpose":
            return int(params["permutation"].index(axis))
        case "broadcast_in_dim":
            return int(params["broadcast_dimensions"][axis])
        case "reshape":
            return _reshaped(out.shape, axis, shape) if params.get("dimensions") is None else None
        case "slice":
            whole_axis = (params["start_indices"][axis], params["limit_indices"][axis])
            stays = whole_axis == (0, shape[axis]) and (params["strides"] or {axis: 1})[axis] == 1
        case "dynamic_slice":
            stays = params["slice_sizes"][axis] == shape[axis]
        case "pad":
            stays = tuple(params["padding_config"][axis]) == (0, 0, 0)
        case "tile":
            stays = params["reps"][axis] == 1
        case "fft":
            stays = axis < len(shape) - len(params["fft_lengths"])
        case "stack":
            return axis + (params["axis"] <= axis)
        case "unstack":
            return None if params["axis"] == axis else axis - (params["axis"] < axis)
        case "rev":
            stays = axis not in params["dimensions"]
        case "split":
            stays = params["axis"] != axis
        case "top_k":
            stays = params.get("axis", -1) % len(shape) != axis
        case _ if name in OF_MATRICES:
            stays = axis < len(shape) - 2
        case _ if name in ALONG_ONE:
            stays = params[ALONG_ONE[name]] != axis
        case _ if name in REDUCTIONS or name == "squeeze":
            gone = params["dimensions" if name == "squeeze" else "axes"]
            return None if axis in gone else axis - sum(each < axis for each in gone)
        case _:
            return None
    return axis if stays else None


def _reshaped(out: Sequence[int], axis: int, shape: Sequence[int]) -> int | None:
    before = math.prod(shape[:axis])
    for place, size in enumerate(out):
        # The same axis; or, if nothing is before it, an axis that it is merged or split into.
        starts = math.prod(out[:place]) == before
        if starts and size > 1 and (size == shape[axis] or before == 1):
            return place
    return None


def _parameters_match(whole: Any, part: Any, axis: int) -> bool:
    """Return whether the parameters of two equations are equal, but for lengths along an axis."""

    def same(key: str, one: Any, other: Any) -> bool:
        if key in _LENGTHS and len(one) == len(other):
            one, other = (each[:axis] + each[axis + 1 :] for each in (one, other))
        return key in _OF_OUTPUT or one is other or bool(one == other)

    return all(same(key, whole.params[key], part.params[key]) for key in whole.params)


# Parameters with lengths along the axes of an input, and those with lengths of the output, whose
# shape is compared in any case.
_LENGTHS = frozenset({"limit_indices", "slice_sizes"})
_OF_OUTPUT = frozenset({"new_sizes", "shape", "sharding", "out_sharding"})


def _axis_of_product(whole: Any, inputs: Sequence[Kind]) -> Sequence[int] | None:
    contracted, batched = whole.params["dimension_numbers"]
    (left, right), free = inputs, len(batched[0])
    if isinstance(left, Along) and isinstance(right, Along):
        pairs = list(zip(*batched, strict=True))
        both = (left.axis, right.axis)
        return [pairs.index(both)] if both in pairs else None
    for place, kind in enumerate((left, right)):
        if isinstance(kind, Along):
            other = (right, left)[place]
            kept = [
                axis
                for axis in range(whole.invars[place].aval.ndim)
                if axis not in (*contracted[place], *batched[place])
            ]
            if other is not Slicing.SAME or kind.axis not in kept:
                return None
            return [free + kept.index(kind.axis)]
        free += whole.invars[place].aval.ndim - len(contracted[place]) - len(batched[place])
    return None
