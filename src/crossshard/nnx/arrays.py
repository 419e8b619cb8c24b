"""A runner's arguments, which are split over the shards, and its outputs, which are joined."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import _check
from crossshard._check import is_number
from crossshard._flax import nnx
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.nnx.slots import HasSlots
from crossshard.shards.batch_axes import (
    FIRST,
    BatchAxes,
    axes_of,
    check_batch_axis,
    spec_along,
)
from crossshard.shards.devices import own_parts, put


class ByValue:
    """A value as a cache key: compares by type and value, and arrays by their bytes."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash = hash(value)
        except TypeError:
            self._hash = hash(type(value))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or type(self.value) is not type(other.value):
            return False
        ours, theirs = self.value, other.value
        if ours is theirs and isinstance(ours, jax.Array):
            return True
        if isinstance(ours, jax.Array | np.ndarray):
            return _bytes_of(ours) == _bytes_of(theirs)
        try:
            return bool(ours == theirs)
        except ValueError:  # such as a list of arrays
            return ours is theirs


def _bytes_of(array: Any) -> Any:
    if not getattr(array, "is_fully_addressable", True):
        return object()  # other processes have the rest
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return array.shape, array.dtype, np.asarray(array).tobytes()


def kept(key: Any) -> Any:
    """A copy of a key that stays the same when a mutable value in it changes."""
    if isinstance(key, tuple):
        return tuple(map(kept, key))
    if not isinstance(key, ByValue) or isinstance(key.value, jax.Array):
        return key
    kind = type(key.value)
    # What has a hash is not written to, and a copy of what compares by identity is another.
    if kind.__hash__ is not None or kind.__eq__ is object.__eq__:
        return key
    try:
        return ByValue(copy.deepcopy(key.value))
    except Exception:  # a user's class may raise anything
        return key


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The flattened arguments of one call: the arrays, which are on the mesh, and all others."""

    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    # By its place among all leaves: a module, an optimizer, a Python value.
    whole: dict[int, Any]
    # The structure of the positional and the keyword arguments.
    tree: Any

    def own_rows(self) -> str:
        """The types of what this process has of the arrays that are split, for the others."""
        words = []
        for leaf, spec in zip(self.leaves, self.specs, strict=True):
            if spec != PartitionSpec():
                shape, axis = list(leaf.sharding.shard_shape(leaf.shape)), len(spec) - 1
                shape[axis] *= len(leaf.addressable_shards)
                words.append(f"{leaf.dtype}[{','.join(map(str, shape))}]")
        return ",".join(words)

    def key(self) -> Any:
        """The cache key of the arguments."""
        first: dict[int, int] = {}
        whole = tuple(
            # Of a module, which of the modules it is: one may be given twice.
            (place, first.setdefault(id(x), place) if is_stateful(x) else ByValue(x))
            for place, x in self.whole.items()
        )
        types = tuple((leaf.shape, leaf.dtype) for leaf in self.leaves)
        return self.tree, whole, self.specs, types

    def rebuild(self, leaves: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments, with these arrays."""
        arrays = iter(leaves)
        places = range(self.tree.num_leaves)
        args, kwargs = self.tree.unflatten(
            [self.whole[place] if place in self.whole else next(arrays) for place in places]
        )
        return args, kwargs


@dataclasses.dataclass(frozen=True)
class InputAxes:
    """Along which axes the inputs of a runner are split."""

    axes: BatchAxes | tuple[BatchAxes, ...] = FIRST  # of every input, or of each positional one
    has_same_rows: bool = True  # or each input has a number of its own

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[BatchAxes]:
        """The axes of each argument, of those by keyword in the order of their names."""
        if isinstance(self.axes, BatchAxes):
            return [self.axes] * (len(args) + len(kwargs))
        if len(self.axes) != len(args):
            raise ArgumentError(
                f"{'batch_axis' if self.has_same_rows else 'input_shard_axes'} has "
                f"{len(self.axes)} entries for {len(args)} inputs; pass one per input."
            )
        split = [name for name, value in kwargs.items() if not is_whole(value)]
        if split and self.has_same_rows:
            raise ArgumentError(
                f"batch_axis has an entry for each input that is passed by position, and none for "
                f"input {split[0]!r}. Pass it by position."
            )
        return [*self.axes, *[FIRST] * len(kwargs)]


def check_input_axes(input_shard_axes: Any, batch_axis: Any) -> InputAxes:
    """The checked arguments of a runner."""
    if input_shard_axes is None:
        axes = check_batch_axis(batch_axis)
        is_list = isinstance(batch_axis, list | tuple)
        return InputAxes(tuple(map(axes_of, batch_axis)) if is_list else axes)
    if batch_axis != 0:
        raise ArgumentError(
            f"input_shard_axes={_check.shown(input_shard_axes)} and "
            f"batch_axis={_check.shown(batch_axis)} say the same. Pass batch_axis "
            f"alone, which takes an axis, or None, for each input, too."
        )
    if not isinstance(input_shard_axes, list | tuple) or not all(
        axis is None or type(axis) is int for axis in input_shard_axes
    ):
        raise ArgumentTypeError(
            f"input_shard_axes must be a list of ints; got {_check.shown(input_shard_axes)}."
        )
    return InputAxes(tuple(map(axes_of, input_shard_axes)), has_same_rows=False)


def is_stateful(value: Any) -> bool:
    """Whether a runner binds this object to the step rather than splitting it over the shards."""
    return isinstance(value, nnx.Pytree | nnx.Variable | HasSlots)


def is_whole(value: Any) -> bool:
    """Whether an argument is passed to every shard unchanged, rather than split."""
    leaves = jax.tree.leaves(value, is_leaf=is_stateful)
    stateful = [leaf for leaf in leaves if is_stateful(leaf)]
    arrays = [leaf for leaf in leaves if not is_stateful(leaf) and is_numeric(leaf)]
    if stateful and arrays:
        raise ArgumentError(
            f"One argument holds arrays and a {type(stateful[0]).__name__}; arrays are split over "
            f"the shards and a {type(stateful[0]).__name__} is not. Pass them as two arguments."
        )
    return not arrays


def is_numeric(leaf: Any) -> bool:
    """Whether a leaf is split over the shards: a Python bool is a setting."""
    return is_number(leaf) and not isinstance(leaf, bool)


def split_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: InputAxes,
    mesh: jax.sharding.Mesh,
) -> Arguments:
    """Put the arrays of a call on the mesh; each of several processes passes its own part."""
    leaves: list[jax.Array] = []
    specs: list[PartitionSpec] = []
    whole: dict[int, Any] = {}
    # In the order of the leaves, which is that of the names of the keyword arguments.
    named = [(f"input {place}", value) for place, value in enumerate(args)]
    named += [(f"input {name!r}", value) for name, value in sorted(kwargs.items())]
    lengths: dict[str, int] = {}
    for (name, value), of_value in zip(named, axes.of(args, kwargs), strict=True):
        if is_whole(value):
            for leaf in jax.tree.leaves(value, is_leaf=is_stateful):
                whole[len(leaves) + len(whole)] = leaf
            continue
        paths = jax.tree_util.tree_leaves_with_path(value)
        for (path, leaf), axis in zip(paths, of_value.of(value, name), strict=True):
            where = name + jax.tree_util.keystr(path)
            if is_number(leaf):
                _check.array(where, leaf)
            specs.append(_spec(where, leaf, axis, mesh))
            leaves.append(put(leaf, NamedSharding(mesh, specs[-1])))
            if axis is not None:
                lengths[where] = leaves[-1].shape[axis]
        if not axes.has_same_rows:
            # Each input has an axis that the caller chose, so another one may be shorter.
            _check_lengths(lengths)
            lengths = {}
    _check_lengths(lengths)
    tree = jax.tree.structure((args, kwargs), is_leaf=is_stateful)
    return Arguments(tuple(leaves), tuple(specs), whole, tree)


def _spec(where: str, leaf: Any, axis: int | None, mesh: jax.sharding.Mesh) -> PartitionSpec:
    if not is_numeric(leaf):
        raise ArgumentTypeError(
            f"{where} holds arrays and a {type(leaf).__name__}, which cannot be split over the "
            f"shards. Pass it as an argument of its own."
        )
    shape = np.shape(leaf)
    if axis is None:
        return PartitionSpec()
    if not shape:
        raise ArgumentError(
            f"{where} is a scalar, which cannot be split over {mesh.size} shards. Pass it to "
            f"every shard with None in input_shard_axes, or in batch_axis."
        )
    is_own = getattr(leaf, "is_fully_addressable", True)
    shards = own_parts(NamedSharding(mesh, PartitionSpec(mesh.axis_names)), mesh.size)
    shards = shards if is_own else mesh.size
    if shape[axis] % shards:
        of_process = "" if shards == mesh.size else " of this process"
        raise ArgumentError(
            f"{where} has shape {shape}: axis {axis} has length {shape[axis]}, which does not "
            f"divide evenly over {shards} shards{of_process}."
        )
    return spec_along(axis, mesh.axis_names)


def _check_lengths(lengths: dict[str, int]) -> None:
    """Raise unless all arrays, by name, are as long along the axis that is split."""
    names = list(lengths)
    for name in names[1:]:
        if lengths[name] != lengths[names[0]]:
            raise ArgumentError(
                f"{names[0]} and {name} are both split over the shards, and have different numbers "
                f"of rows, {lengths[names[0]]} and {lengths[name]}. For an array that every shard "
                f"gets whole, write crossshard.shard(..., batch_axis=[...]) with None in its "
                f"place, and the axis of its rows for each other one; input_shard_axes=[...] says "
                f"that inputs of several lengths are meant to be split."
            )


@dataclasses.dataclass(frozen=True)
class Outputs:
    """How the outputs of the shards are joined."""

    # For each output whether to join all shards' or take the first's; one value for all.
    from_all: tuple[bool, ...] = (True,)
    axes: tuple[int, ...] | None = None  # for each output; axis 0 of all if None

    def lay_out(
        self, out: Any, names: tuple[str, ...]
    ) -> list[tuple[jax.Array, PartitionSpec, bool]]:
        """The arrays of one shard's outputs, the specs of the joined ones, and which are joined."""
        several = isinstance(out, list | tuple) and not hasattr(out, "_fields")
        tops = list(out) if several else [out]
        flags = self.from_all * len(tops) if len(self.from_all) == 1 else self.from_all
        axes = (0,) * len(tops) if self.axes is None else self.axes
        for name, given in (("outputs_from_all_shards", flags), ("output_shard_axes", axes)):
            if len(given) != len(tops):
                raise ArgumentError(
                    f"{name} has {len(given)} entries for {len(tops)} outputs; pass one per output."
                )
        found = []
        for top, from_all, axis in zip(tops, flags, axes, strict=True):
            for x in jax.tree.leaves(top):
                if not from_all or x.ndim == 0:
                    found.append((x[None], PartitionSpec(names), from_all))
                elif -x.ndim <= axis < x.ndim:
                    spec = PartitionSpec(*[None] * (axis % x.ndim), names)
                    found.append((x, spec, from_all))
                else:
                    raise ArgumentError(
                        f"output_shard_axes names axis {axis} of an output of shape {x.shape}."
                    )
        return found


def check_outputs(outputs_from_all_shards: Any, output_shard_axes: Any) -> Outputs:
    """The checked arguments of a runner."""
    given = outputs_from_all_shards
    flags = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(flag, bool) for flag in flags):
        raise ArgumentTypeError(
            f"outputs_from_all_shards must be bools; got {_check.shown(given)}."
        )
    axes = output_shard_axes
    if axes is None:
        return Outputs(flags)
    if not isinstance(axes, list | tuple) or not all(type(axis) is int for axis in axes):
        raise ArgumentTypeError(
            f"output_shard_axes must be a list of ints; got {_check.shown(axes)}."
        )
    return Outputs(flags, tuple(axes))


def as_output(value: Any) -> Any:
    """A computation's outputs as arrays; a variable becomes its value."""

    def one(leaf: Any) -> Any:
        leaf = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if is_stateful(leaf) or not is_number(leaf):
            raise ArgumentTypeError(
                f"A step returned a {type(leaf).__name__}; outputs are arrays, numbers and pytrees "
                f"of them. Do not return modules and variables: the runner updates them in place."
            )
        return jnp.asarray(leaf)

    return jax.tree.map(one, value, is_leaf=is_stateful)
