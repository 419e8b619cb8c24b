"""Splits a runner's arguments over the shards and joins its outputs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import _check
from crossshard._check import is_number
from crossshard._flax import nnx
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.nnx.graph import is_stateful
from crossshard.nnx.keys import ByValue
from crossshard.shards.batch_axes import FIRST, BatchAxes, axes_of, check_batch_axis, spec_along
from crossshard.shards.devices import own_parts, put


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The flattened arguments of one call.

    Attributes:
      leaves: the arrays, on the mesh.
      specs: their specs.
      whole: by its place among all leaves, what every shard gets unchanged: a module, an optimizer,
        a Python value.
      tree: the structure of the positional and the keyword arguments.
    """

    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    whole: dict[int, Any]
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
    """Along which axes the inputs of a runner are split.

    Attributes:
      of_all: the axes of every input.
      of_each: those of each positional one; ``None`` if they are ``of_all``.
      argument: the argument that said so: arrays that ``batch_axis`` splits have as many rows.
    """

    of_all: BatchAxes = FIRST
    of_each: tuple[BatchAxes, ...] | None = None
    argument: str = "batch_axis"

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[BatchAxes]:
        """The axes of each argument, of those by keyword in the order of their names.

        Raises:
          ArgumentError: they are not one for each argument.
        """
        if self.of_each is None:
            return [self.of_all] * (len(args) + len(kwargs))
        if len(self.of_each) != len(args):
            raise ArgumentError(
                f"{self.argument} has {len(self.of_each)} entries for {len(args)} inputs; pass one "
                f"per input."
            )
        split = [name for name, value in kwargs.items() if not is_whole(value)]
        if split and self.has_same_rows:
            raise ArgumentError(
                f"batch_axis has an entry for each input that is passed by position, and none for "
                f"input {split[0]!r}. Pass it by position."
            )
        return [*self.of_each, *[self.of_all] * len(kwargs)]

    @property
    def has_same_rows(self) -> bool:
        """Whether all inputs have as many rows, or each a number of its own."""
        return self.of_each is None or self.argument == "batch_axis"


def check_input_axes(input_shard_axes: Any, batch_axis: Any) -> InputAxes:
    """The checked arguments of a runner.

    Raises:
      ArgumentError: both are given, or every shard would get all.
      ArgumentTypeError: they are not axes.
    """
    if input_shard_axes is None:
        if not isinstance(batch_axis, list | tuple):
            return InputAxes(check_batch_axis(batch_axis))
        check_batch_axis(batch_axis)
        return InputAxes(of_each=tuple(map(axes_of, batch_axis)))
    if batch_axis != 0:
        raise ArgumentError(
            f"input_shard_axes={_check.shown(input_shard_axes)} and "
            f"batch_axis={_check.shown(batch_axis)} say the same. Pass batch_axis "
            f"alone, which takes an axis, or None, for each input, too."
        )
    each = input_shard_axes if isinstance(input_shard_axes, list | tuple) else ()
    if not isinstance(input_shard_axes, list | tuple) or not all(
        axis is None or type(axis) is int for axis in each
    ):
        raise ArgumentTypeError(
            f"input_shard_axes must be a list of ints; got {_check.shown(input_shard_axes)}."
        )
    return InputAxes(of_each=tuple(map(axes_of, each)), argument="input_shard_axes")


def is_whole(value: Any) -> bool:
    """Whether an argument is passed to every shard unchanged, rather than split.

    Raises:
      ArgumentError: it mixes arrays with modules, variables or optimizers.
    """
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
    """Put the arrays of a call on the mesh; each of several processes passes its own part.

    Raises:
      ArgumentError: an axis that does not exist or does not divide evenly, arrays of different
        lengths, or axes that do not match the arguments.
    """
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
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "OSUMmV" and not hasattr(jnp, dtype.name):
        raise ArgumentTypeError(f"{where} is an array of {dtype}, which JAX cannot hold.")
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


class LaidOut(NamedTuple):
    """One shard's part of an output.

    Attributes:
      local: the array, in the shape for its spec.
      spec: the spec of the joined array.
      from_all: whether the output is joined over the shards, or the first shard's.
    """

    local: jax.Array
    spec: PartitionSpec
    from_all: bool


@dataclasses.dataclass(frozen=True)
class Outputs:
    """How the outputs of the shards are joined.

    Attributes:
      from_all: for each output whether to join all shards' or take the first's; one value for all.
      axes: for each output the axis to join along; ``None`` for axis 0 of all.
    """

    from_all: tuple[bool, ...] = (True,)
    axes: tuple[int | None, ...] | None = None

    def lay_out(self, out: Any, names: tuple[str, ...]) -> list[LaidOut]:
        """The leaves of one shard's outputs.

        Raises:
          ArgumentError: options that do not match the outputs.
        """
        several = isinstance(out, list | tuple) and not hasattr(out, "_fields")
        tops = list(out) if several else [out]
        flags = self.from_all * len(tops) if len(self.from_all) == 1 else self.from_all
        axes = (0,) * len(tops) if self.axes is None else self.axes
        for name, given in (("outputs_from_all_shards", flags), ("output_shard_axes", axes)):
            if len(given) != len(tops):
                raise ArgumentError(
                    f"{name} has {len(given)} entries for {len(tops)} outputs; pass one per output."
                )
        return [
            _laid_out(x, flag, axis or 0, names)
            for top, flag, axis in zip(tops, flags, axes, strict=True)
            for x in jax.tree.leaves(top)
        ]


def _laid_out(x: jax.Array, from_all: bool, axis: int, names: tuple[str, ...]) -> LaidOut:
    if not from_all or x.ndim == 0:
        return LaidOut(x[None], PartitionSpec(names), from_all)
    if not -x.ndim <= axis < x.ndim:
        raise ArgumentError(f"output_shard_axes names axis {axis} of an output of shape {x.shape}.")
    return LaidOut(x, PartitionSpec(*[None] * (axis % x.ndim), names), from_all)


def as_output(value: Any) -> Any:
    """A computation's outputs as arrays; a variable becomes its value.

    Raises:
      ArgumentTypeError: an output that is not an array.
    """

    def one(leaf: Any) -> Any:
        leaf = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if is_stateful(leaf) or not is_number(leaf):
            raise ArgumentTypeError(
                f"A step returned a {type(leaf).__name__}; outputs are arrays, numbers and pytrees "
                f"of them. Do not return modules and variables: the runner updates them in place."
            )
        return jnp.asarray(leaf)

    return jax.tree.map(one, value, is_leaf=is_stateful)
