"""Slices along an axis: which values of an update are sliced as its arguments are.

An update that treats each matrix of a stack alone computes the same on some of them. Its jaxpr on
full arrays is compared with the one on slices: an operation along other axes keeps the slices, and
one that is elementwise too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossshard import _jax
from crossshard.jaxprs.elementwise import (
    COMPUTES_WITH_SHAPE,
    Along,
    Elementwise,
    Kind,
    Mixed,
    Slicing,
)
from crossshard.jaxprs.primitives import ALONG_ONE, ELEMENTWISE, OF_MATRICES, REDUCTIONS
from crossshard.jaxprs.walk import Equations


class OnSlices(Elementwise):
    """The kinds of values, some of which are slices along an axis."""

    def literal(self, values: Sequence[Any], equation: Any) -> Kind:
        if np.array_equal(values[0], values[1], equal_nan=True):
            return Slicing.SAME
        return Mixed(COMPUTES_WITH_SHAPE, "" if equation is None else _jax.source_of(equation))

    def join(self, facts: Sequence[Kind]) -> Kind:
        mixed: list[Kind] = [kind for kind in facts if isinstance(kind, Mixed)]
        # One number at every position is a slice of any kind.
        kinds = [kind for kind in facts if kind is not Slicing.UNIFORM]
        if mixed or len(set(kinds)) < 2:
            return [*mixed, *kinds, Slicing.UNIFORM][0]
        return Mixed("an array that is sliced in one way on one path and in another on another")

    def transfer(self, equations: Equations, inputs: Sequence[Kind]) -> Sequence[Kind]:
        whole, part = equations
        name, number = whole.primitive.name, len(whole.outvars)
        if name == "optimization_barrier" or any(isinstance(kind, Mixed) for kind in inputs):
            return super().transfer(equations, inputs)
        if any(isinstance(kind, Along) for kind in inputs):
            return self._along(whole, part, inputs)
        if name == "reshape" and list(inputs) == [Slicing.SLICE] and _is_ravel(whole):
            # In one order for all arrays of a leaf, which are split alike.
            return [Slicing.SLICE]
        if Slicing.SLICE in inputs or name == "broadcast_in_dim":
            return super().transfer(equations, inputs)
        if Slicing.UNIFORM in inputs and name in ELEMENTWISE:
            single = [atom.aval.size == 1 for atom in whole.invars]
            if all(
                each or kind is Slicing.UNIFORM for each, kind in zip(single, inputs, strict=True)
            ):
                return [Slicing.UNIFORM] * number
        if _shapes(whole) == _shapes(part):
            return super().transfer(equations, [Slicing.SAME] * len(inputs))
        return super().transfer(equations, inputs)

    @staticmethod
    def _of_same(whole: Any, part: Any) -> Kind:
        if whole.primitive.name != "broadcast_in_dim":
            return Elementwise._of_same(whole, part)
        given, out = whole.invars[0].aval, whole.outvars[0].aval
        if given.size == 1 < out.size:
            return Slicing.UNIFORM
        axis = _axis_of_slices(out.shape, part.outvars[0].aval.shape)
        at = whole.params["broadcast_dimensions"]
        repeated = axis is not None and (axis not in at or given.shape[at.index(axis)] == 1)
        return Along(axis) if axis is not None and repeated else Elementwise._of_same(whole, part)

    def _along(self, whole: Any, part: Any, inputs: Sequence[Kind]) -> Sequence[Kind]:
        name = whole.primitive.name
        try:
            axes = axes_after(whole, part, inputs)
        except ValueError:
            axes = None
        if axes is None or not all(map(_is_slice, whole.outvars, part.outvars, axes)):
            mixed = Mixed(f"{name} over the stack of a parameter", _jax.source_of(whole))
            return [mixed] * len(whole.outvars)
        return [Along(axis) for axis in axes]


def _shapes(equation: Any) -> list[tuple[int, ...]]:
    return [atom.aval.shape for atom in (*equation.invars, *equation.outvars)]


def _is_ravel(equation: Any) -> bool:
    return equation.outvars[0].aval.ndim == 1 and _jax.keeps_order(equation)


def _axis_of_slices(whole: Sequence[int], part: Sequence[int]) -> int | None:
    """The one axis in which two shapes differ."""
    if len(whole) != len(part):
        return None
    differ = [axis for axis, pair in enumerate(zip(whole, part, strict=True)) if len(set(pair)) > 1]
    return differ[0] if len(differ) == 1 else None


def _is_slice(whole: Any, part: Any, axis: int) -> bool:
    return _axis_of_slices(whole.aval.shape, part.aval.shape) == axis


def axes_after(whole: Any, part: Any, inputs: Sequence[Kind]) -> Sequence[int] | None:
    """The axis of the slices of each output; ``None`` if the equation mixes them."""
    name, params, outs = whole.primitive.name, whole.params, len(whole.outvars)
    found = {kind.axis for kind in inputs if isinstance(kind, Along)}
    if name == "dot_general":
        return _of_product(whole, inputs) if _jax.same_but_for_shapes(whole, part) else None
    if len(found) != 1:
        return None
    axis = found.pop()
    if not _alike(whole, part, axis):
        return None
    shape = next(
        atom.aval.shape
        for atom, kind in zip(whole.invars, inputs, strict=True)
        if isinstance(kind, Along)
    )
    others = [
        atom.aval
        for atom, kind in zip(whole.invars, inputs, strict=True)
        if not (isinstance(kind, Along) or kind is Slicing.UNIFORM or atom.aval.size == 1)
    ]
    if name in ELEMENTWISE:
        # What is not a slice is the same at every position along the axis.
        alike = all(x.ndim == len(shape) and x.shape[axis] == 1 for x in others)
        return [axis] if alike else None
    if others:
        return None
    if name in OF_MATRICES:
        return [axis] * outs if axis < len(shape) - 2 else None
    if name in ALONG_ONE:
        return [axis] * outs if params[ALONG_ONE[name]] != axis else None
    if name in REDUCTIONS:
        axes = params["axes"]
        return None if axis in axes else [axis - sum(each < axis for each in axes)]
    moved = _MOVES.get(name)
    return None if moved is None else moved(whole, axis, shape)


def _alike(whole: Any, part: Any, axis: int) -> bool:
    """Whether the parameters of two equations are equal, but for lengths along an axis."""

    def same(key: str, one: Any, other: Any) -> bool:
        if key in _LENGTHS and len(one) == len(other):
            one, other = (each[:axis] + each[axis + 1 :] for each in (one, other))
        return key in _OF_OUTPUT or one is other or bool(one == other)

    return all(same(key, whole.params[key], part.params[key]) for key in whole.params)


# They say how long the axes of an input are; those of an output are compared.
_LENGTHS = frozenset({"limit_indices", "slice_sizes"})
_OF_OUTPUT = frozenset({"new_sizes", "shape", "sharding", "out_sharding"})


def _of_product(whole: Any, inputs: Sequence[Kind]) -> Sequence[int] | None:
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


def _transposed(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int]:
    del shape
    return [whole.params["permutation"].index(axis)]


def _broadcast(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int]:
    del shape
    return [whole.params["broadcast_dimensions"][axis]]


def _squeezed(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int] | None:
    del shape
    gone = whole.params["dimensions"]
    return None if axis in gone else [axis - sum(each < axis for each in gone)]


def _reshaped(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int] | None:
    if whole.params.get("dimensions") is not None:
        return None
    out, before = whole.outvars[0].aval.shape, math.prod(shape[:axis])
    for place, size in enumerate(out):
        # The same axis; or, if nothing is before it, one that it begins or is split into.
        starts = math.prod(out[:place]) == before
        if starts and size > 1 and (size == shape[axis] or before == 1):
            return [place]
    return None


def _sliced(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int] | None:
    params, strides = whole.params, whole.params["strides"]
    full = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == shape[axis]
    return [axis] if full and (strides is None or strides[axis] == 1) else None


def _taken(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int] | None:
    return [axis] if whole.params["slice_sizes"][axis] == shape[axis] else None


def _padded(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int] | None:
    del shape
    return [axis] if tuple(whole.params["padding_config"][axis]) == (0, 0, 0) else None


def _reversed(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int] | None:
    del shape
    return None if axis in whole.params["dimensions"] else [axis]


def _split(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int] | None:
    del shape
    return None if whole.params["axis"] == axis else [axis] * len(whole.outvars)


def _top(whole: Any, axis: int, shape: Sequence[int]) -> Sequence[int] | None:
    of = whole.params.get("axis", -1) % len(shape)
    return None if axis == of else [axis] * len(whole.outvars)


_MOVES: dict[str, Callable[[Any, int, Sequence[int]], Sequence[int] | None]] = {
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _taken,
    "pad": _padded,
    "reshape": _reshaped,
    "rev": _reversed,
    "slice": _sliced,
    "split": _split,
    "squeeze": _squeezed,
    "top_k": _top,
    "transpose": _transposed,
}
