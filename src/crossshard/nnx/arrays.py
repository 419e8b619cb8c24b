"""Splits a runner's arguments over the shards and joins its outputs."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from crossshard._flax import nnx
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_number
from crossshard.nnx.graph import is_stateful
from crossshard.shards.put import own_parts, put

# ``replicate`` stacks the arrays of its replicas, so each shard drops the axis of the split.
REPLICAS = "replicas"


@dataclasses.dataclass(frozen=True)
class Whole:
    """An argument that every shard gets unchanged: a module, an optimizer, a Python value."""

    value: Any

    def key(self) -> Any:
        """The cache key of this argument."""
        leaves, tree = jax.tree.flatten(self.value, is_leaf=is_stateful)
        return tree, tuple(None if is_stateful(leaf) else Hashable(leaf) for leaf in leaves)


class Hashable:
    """A value as a cache key: compares by type and value, or by identity if it is an array."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash = hash(value)
        except TypeError:
            self._hash = hash(type(value))

    @property
    def is_written_to(self) -> bool:
        """Whether it is mutable and compares by value."""
        of_class = [getattr(type(self.value), name) for name in ("__hash__", "__eq__")]
        return of_class[0] is None and of_class[1] != object.__eq__

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Hashable) or type(self.value) is not type(other.value):
            return False
        try:
            return bool(self.value == other.value)
        except ValueError:  # such as arrays, which compare element by element
            return self.value is other.value


class Constant:
    """An array that a program has as a constant, as a cache key: compares by value."""

    def __init__(self, value: Any):
        # An array of numpy may be written to.
        self._value = value.copy() if isinstance(value, np.ndarray) else value

    def __hash__(self) -> int:
        return hash((self._value.shape, self._value.dtype))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        ours, theirs = self._value, other._value
        if ours is theirs:
            return True
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return False
        if not all(getattr(each, "is_fully_addressable", True) for each in (ours, theirs)):
            return False  # other processes have the rest
        return _bytes_of(ours) == _bytes_of(theirs)


def _bytes_of(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def kept_key(key: Any) -> Any:
    """A copy of a key that stays the same when a mutable value in it changes."""
    if isinstance(key, tuple):
        return tuple(map(kept_key, key))
    if not isinstance(key, Hashable) or not key.is_written_to:
        return key
    try:
        return Hashable(copy.deepcopy(key.value))
    except Exception:  # a user's class may raise anything
        return key


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The flattened arguments of one call.

    Attributes:
      leaves: the arrays, on the mesh.
      specs: their specs.
      items: for each argument ``Whole``, or the tree structure of its arrays.
      names: the names of the keyword arguments, which come last.
      squeeze: whether each shard drops axis 0 of its arrays.
    """

    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    items: tuple[Any, ...]
    names: tuple[str, ...]
    squeeze: bool = False

    @property
    def whole(self) -> list[Any]:
        """The arguments that are not split."""
        return [item.value for item in self.items if isinstance(item, Whole)]

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
        items = tuple(item.key() if isinstance(item, Whole) else item for item in self.items)
        types = tuple((leaf.shape, leaf.dtype) for leaf in self.leaves)
        return items, self.names, self.specs, types, self.squeeze

    def rebuild(self, leaves: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments, with these leaves."""
        rest = [leaf[0] for leaf in leaves] if self.squeeze else list(leaves)
        values = []
        for item in self.items:
            if isinstance(item, Whole):
                values.append(item.value)
            else:
                values.append(item.unflatten(rest[: item.num_leaves]))
                rest = rest[item.num_leaves :]
        positional = len(values) - len(self.names)
        return values[:positional], dict(zip(self.names, values[positional:], strict=True))


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
    axes: tuple[int | None, ...] | str | None,
    mesh: jax.sharding.Mesh,
) -> Arguments:
    """Put the arrays of a call on the mesh; each of several processes passes its own part.

    Raises:
      ArgumentError: an axis that does not exist or does not divide evenly, arrays of different
        lengths, or a list of axes that does not match the arguments.
    """
    squeeze = axes == REPLICAS
    per_argument = axes if isinstance(axes, tuple) else (0,) * len(args)
    if len(per_argument) != len(args):
        raise ArgumentError(
            f"input_shard_axes has {len(per_argument)} entries for {len(args)} inputs; pass one "
            f"per input."
        )
    leaves: list[jax.Array] = []
    specs: list[PartitionSpec] = []
    items: list[Any] = []
    named = [(f"input {place}", value) for place, value in enumerate(args)]
    named += [(f"input {name!r}", value) for name, value in kwargs.items()]
    lengths: dict[str, int] = {}
    for (name, value), axis in zip(named, per_argument + (0,) * len(kwargs), strict=True):
        if is_whole(value):
            items.append(Whole(value))
            continue
        paths, tree = jax.tree_util.tree_flatten_with_path(value)
        items.append(tree)
        for path, leaf in paths:
            where = name + jax.tree_util.keystr(path)
            spec = _spec(where, leaf, axis, mesh, squeeze)
            specs.append(spec)
            # Every process stacks all replicas.
            leaves.append(put(leaf, NamedSharding(mesh, spec), whole=squeeze))
            if axis is not None:
                lengths[where] = leaves[-1].shape[axis]
        if axes is not None:
            # Each input has an axis that the caller chose, so another one may be shorter.
            _check_lengths(lengths)
            lengths = {}
    _check_lengths(lengths)
    return Arguments(tuple(leaves), tuple(specs), tuple(items), tuple(kwargs), squeeze)


def _spec(
    where: str, leaf: Any, axis: int | None, mesh: jax.sharding.Mesh, squeeze: bool
) -> PartitionSpec:
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
            f"every shard with None in input_shard_axes."
        )
    if not -len(shape) <= axis < len(shape):
        raise ArgumentError(f"{where} has shape {shape} and no axis {axis} to split along.")
    axis %= len(shape)
    is_own = getattr(leaf, "is_fully_addressable", True)
    shards = own_parts(NamedSharding(mesh, PartitionSpec(mesh.axis_names)), mesh.size)
    shards = shards if is_own and not squeeze else mesh.size
    if shape[axis] % shards:
        of_process = "" if shards == mesh.size else " of this process"
        raise ArgumentError(
            f"{where} has shape {shape}: axis {axis} has length {shape[axis]}, which does not "
            f"divide evenly over {shards} shards{of_process}."
        )
    return PartitionSpec(*[None] * axis, mesh.axis_names)


def _check_lengths(lengths: dict[str, int]) -> None:
    """Raise unless all arrays, by name, are as long along the axis that is split."""
    names = list(lengths)
    for name in names[1:]:
        if lengths[name] != lengths[names[0]]:
            raise ArgumentError(
                f"{names[0]} and {name} are both split over the shards, and have different numbers "
                f"of rows, {lengths[names[0]]} and {lengths[name]}. For an array that every shard "
                f"gets whole, write crossshard.shard(..., input_shard_axes=[...]) with None in its "
                f"place, and its axis if it is meant to be split; pass the arrays of one input as "
                f"several inputs, and by position."
            )


@dataclasses.dataclass(frozen=True)
class Outputs:
    """How the outputs of the shards are joined.

    Attributes:
      from_all: for each output whether to join all shards' or take the first's; one value for all.
      axes: for each output the axis to join along; ``None`` for axis 0 of all.
      stack: whether all outputs are stacked along a new axis 0 instead of joined.
    """

    from_all: tuple[bool, ...] = (True,)
    axes: tuple[int | None, ...] | None = None
    stack: bool = False

    def plan(self, out: Any) -> tuple[list[tuple[bool, int]], Any]:
        """For each output leaf whether it is from all shards, and its axis; and the tree structure.

        Raises:
          ArgumentError: options that do not match the number of outputs.
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
        leaves = [
            (flag, axis or 0)
            for top, flag, axis in zip(tops, flags, axes, strict=True)
            for _ in jax.tree.leaves(top)
        ]
        return leaves, jax.tree.structure(out)

    def lay_out(self, x: Any, from_all: bool, axis: int) -> Any:
        """One shard's output, in the shape for its spec."""
        if self.stack or not from_all or x.ndim == 0:
            return x[None]
        if not -x.ndim <= axis < x.ndim:
            raise ArgumentError(
                f"output_shard_axes names axis {axis} of an output of shape {x.shape}."
            )
        return x

    def spec(self, x: Any, from_all: bool, axis: int, names: tuple[str, ...]) -> PartitionSpec:
        """The spec of an output, given one shard's ``x``."""
        if self.stack or not from_all or x.ndim == 0:
            return PartitionSpec(names)
        return PartitionSpec(*[None] * (axis % x.ndim), names)


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
