"""How an array is cut: into a slice for each shard, over other axes of the mesh, or not at all."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.errors import ArgumentError
from crossshard.shards.axes import GroupAssignment
from crossshard.shards.devices import between_cpus, sends_beside_products

# Smaller arrays stay replicated: sharding them costs more than it saves.
_TINY = 1024
# Smaller arrays are bucketed: starting a collective costs more than copying them.
_SMALL = 1 << 15
# The same between processes on CPUs, where starting a collective takes milliseconds.
_SMALL_BETWEEN_CPUS = 1 << 20
# A slice is padded to whole tiles if that adds at most 1 / _PADDING of its size.
_PADDING = 16
# A longer first axis is not taken for the axis of stacked layers.
_MOST_LAYERS = 256
# The spec of an array that is replicated, or not split over the axes in question.
WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class TileShape:
    """The smallest slice that a platform scatters efficiently."""

    rows: int = 1  # the minimal number of rows of a slice
    lanes: int = 1  # the number of elements of a row
    # Whether arrays of several dimensions are split along the last axis, if a slice has whole rows
    # of lanes.
    by_columns: bool = False

    @property
    def size(self) -> int:
        """The number of elements of a tile."""
        return self.rows * self.lanes

    def padding(self, width: int) -> int:
        """Return how many zeros follow ``width`` elements to fill a tile.

        They fill only a row if a tile would add too many.

        With too few rows XLA emits an all-reduce, but only in the last of several stages, of small
        arrays. Whole tiles for 4,096 chips would be 34 MB.
        """
        to_tile = -width % self.size
        return to_tile if _PADDING * to_tile <= width else -width % self.lanes


ANY = TileShape()
# For fewer rows, or one-dimensional arrays, XLA for TPUs emits an all-reduce and a slice: seen in
# the compiled programs of v5e, v6e and v5p slices.
TPU = TileShape(rows=16, lanes=128)
# In a ring, products with slices of rows have to be added up through memory; products with slices
# of columns need no addition.
_IN_RINGS = dataclasses.replace(TPU, by_columns=True)


def tile_for(mesh: Mesh, params_sharded: bool) -> TileShape:
    """Return the tile of a mesh's platform, for sharded parameters, or replicated ones."""
    if mesh.devices.flat[0].platform != "tpu":
        return ANY
    return _IN_RINGS if params_sharded and sends_beside_products(mesh) else TPU


@dataclasses.dataclass(frozen=True)
class Partition:
    """How an array is split into one slice per shard.

    It is split along an axis, or flattened and padded with zeros. A slice has as many dimensions as
    the array, because some optimizers check the rank.
    """

    shape: tuple[int, ...]  # the shape of the array
    number: int = 1  # the number of slices; 1 if the array is replicated
    axis: int | None = 0  # the axis to split; ``None`` to split the flattened array
    tile: TileShape = ANY  # the smallest slice that the platform scatters efficiently
    # Its spec on other mesh axes. The axis to split is free of them.
    other_axes: PartitionSpec = WHOLE

    @property
    def _elements(self) -> int:
        """The number of elements of one slice, without padding."""
        return -(-math.prod(self.shape) // self.number)

    @property
    def _in_tiles(self) -> bool:
        # A smaller slice would be mostly padding; its bucket is padded once instead.
        return self.axis is None and self.tile.size > 1 and self._elements >= 8 * self.tile.size

    @property
    def fills_rows(self) -> bool:
        """Whether a slice can travel as it is, without the padding of a bucket."""
        return self.axis is not None or math.prod(self.local_shape) % self.tile.lanes == 0

    @property
    def is_small(self) -> bool:
        """Whether the array shares a bucket with other small arrays."""
        if self.axis:
            return False
        if self.tile.size > 1 and self.number > 1:
            enough = len(self.shape) > 1 and self.local_shape[0] >= self.tile.rows
            return not (self._in_tiles or (self.axis == 0 and enough))
        return _is_small(self.shape)

    @property
    def row(self) -> "Partition | None":
        """The partition of one entry along axis 0, such as one of several stacked layers.

        ``None`` if the array is split along that axis, or an entry is too small for a collective.
        """
        split = self.number > 1
        if len(self.shape) < 2 or (split and not self.axis) or any(self.other_axes[:1]):
            return None
        axis = (self.axis or 0) - 1 if split else 0
        others = PartitionSpec(*self.other_axes[1:])
        row = dataclasses.replace(self, shape=self.shape[1:], axis=axis, other_axes=others)
        return None if _is_small(row.shape) else row

    @property
    def travels_alone(self) -> bool:
        """Whether the array is split, and large enough for a collective of its own."""
        return self.number > 1 and not (self.is_small or _is_small(self.shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one slice."""
        if self.number == 1:
            return self.shape
        if self.axis is not None:
            length = self.shape[self.axis] // self.number
            return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])
        if not self._in_tiles:
            return (self._elements, *[1] * (len(self.shape) - 1))
        tiles, lanes = -(-self._elements // self.tile.size), self.tile.lanes
        if len(self.shape) == 1:
            return (tiles * self.tile.size,)
        return (tiles * self.tile.rows, *[1] * (len(self.shape) - 2), lanes)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of the packed array: all slices concatenated."""
        if self.number == 1 or self.axis is not None:
            return self.shape
        return (self.number * self.local_shape[0], *self.local_shape[1:])

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Return the ``PartitionSpec`` of the packed array, given the shard axes."""
        if self.number == 1:
            return self.other_axes
        axis = self.axis or 0
        before, after = self.other_axes[:axis], self.other_axes[axis + 1 :]
        return PartitionSpec(*before, *[None] * (axis - len(before)), axes, *after)

    def of_block(self, sizes: Mapping[str, int]) -> "Partition":
        """Return the partition of one device's block over the other axes, given their sizes."""
        shape = list(self.shape)
        for dimension, names in enumerate(self.other_axes):
            for name in (names,) if isinstance(names, str) else names or ():
                shape[dimension] //= sizes[name]
        return dataclasses.replace(self, shape=tuple(shape), other_axes=WHOLE)

    def pack(self, array: Any) -> jax.Array:
        """Return the slices of an array, concatenated and padded."""
        if self.number == 1 or self.axis is not None:
            return jnp.asarray(array)
        flat = jnp.ravel(array)
        padded = jnp.pad(flat, (0, math.prod(self.packed_shape) - flat.size))
        return padded.reshape(self.packed_shape)

    def unpack(self, packed: Any) -> jax.Array:
        """Undo ``pack``."""
        if self.number == 1 or self.axis is not None:
            return jnp.asarray(packed)
        return jnp.ravel(packed)[: math.prod(self.shape)].reshape(self.shape)

    def slices(self, array: Any) -> jax.Array:
        """Return the slices of an array that is split, ``[number, …]``."""
        packed = self.pack(array)
        if self.axis:
            return jnp.stack(jnp.split(packed, self.number, self.axis))
        return packed.reshape(self.number, *self.local_shape)

    def joined(self, slices: jax.Array) -> jax.Array:
        """Undo ``slices``."""
        if self.axis:
            return jnp.concatenate(list(slices), self.axis)
        return self.unpack(slices.reshape(-1, *self.local_shape[1:]))

    def local_slice(self, array: Any, index: jax.Array) -> jax.Array:
        """Return the slice at ``index`` of a full array."""
        if self.number == 1:
            return jnp.asarray(array)
        axis = self.axis or 0
        length = self.local_shape[axis]
        return lax.dynamic_slice_in_dim(
            self.pack(array), index * length, length, axis, allow_negative_indices=False
        )


def _is_small(shape: Sequence[int]) -> bool:
    """Return whether starting a collective costs more than copying such an array."""
    return math.prod(shape) < (_SMALL_BETWEEN_CPUS if between_cpus() else _SMALL)


def partition_for(
    shape: Sequence[int],
    number: int,
    tile: TileShape = ANY,
    other_axes: PartitionSpec = WHOLE,
) -> Partition:
    """Return the partition of a replicated parameter.

    By default its slices, one after the other, are the flattened array. Tiny arrays stay
    replicated. Arrays that look like stacked layers are split within each layer. Arrays that are
    already split over other mesh axes are split along a free axis.
    """
    shape = tuple(shape)
    if other_axes or _may_be_layers(shape):
        along = partition_along_axis(shape, number, tile, other_axes)
        if other_axes or (along.axis and along.local_shape[along.axis] >= tile.rows):
            return along
    if math.prod(shape) < _TINY or number == 1:
        return Partition(shape)
    flat = len(shape) == 1 and tile.lanes > 1
    in_rows = shape[0] % number == 0 and shape[0] // number >= tile.rows and not flat
    return Partition(shape, number, 0 if in_rows else None, tile)


def partition_along_axis(
    shape: Sequence[int],
    number: int,
    tile: TileShape = ANY,
    other_axes: PartitionSpec = WHOLE,
) -> Partition:
    """Return a partition along a free axis that divides by ``number``, or a replicated one."""
    shape = tuple(shape)
    taken = {axis for axis, names in enumerate(other_axes) if names is not None}
    axes = [axis for axis, size in enumerate(shape) if size % number == 0 and axis not in taken]
    if math.prod(shape) < _TINY or number == 1 or not axes:
        return Partition(shape, other_axes=other_axes)
    last = len(shape) - 1
    if tile.by_columns and last > 0 and last in axes and shape[last] // number % tile.lanes == 0:
        return Partition(shape, number, last, tile, other_axes)
    within = [axis for axis in axes if axis > 0] if _may_be_layers(shape) else axes
    # XLA for TPUs scatters a slice efficiently if it has this many rows.
    filled = [axis for axis in within if shape[axis] // number >= tile.rows]
    return Partition(shape, number, [*filled, *within, *axes][0], tile, other_axes)


def _may_be_layers(shape: Sequence[int]) -> bool:
    """Return whether an array may be one of stacked layers, which a loop takes one by one."""
    return len(shape) > 2 and shape[0] <= _MOST_LAYERS and not _is_small(shape[1:])


def map_partitions(
    function: Callable[[Partition, Any], Any], partitions: Sequence[Partition], tree: Any
) -> Any:
    """Return a pytree of ``function(partition, leaf)`` for each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([function(*pair) for pair in zip(partitions, leaves, strict=True)])


# ---- How one array is placed on the mesh.


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one array is placed: replicated, partitioned over the shards, or one per shard.

    Attributes:
      partition: how it is split over the shards; ``None`` if it is not.
      per_shard: whether each shard has its own array, stored as ``[shards, …]``.
      groups: with both, the groups within which the array is split: each shard has its slice of
        its group's array.

    >>> Placement(per_shard=True).stored_shape((3,), number_of_shards=8)
    (8, 3)
    """

    partition: Partition | None = None
    per_shard: bool = False
    groups: GroupAssignment | None = None

    @property
    def other_axes(self) -> PartitionSpec:
        """Its spec on the other axes of the mesh."""
        return WHOLE if self.partition is None else self.partition.other_axes

    @property
    def is_split(self) -> bool:
        """Whether a shard has only a slice of the array."""
        return self.partition is not None and self.partition.number > 1

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Return the ``PartitionSpec`` of the stored array, given the shard axes."""
        if self.per_shard:
            return PartitionSpec(axes, *self.other_axes)
        return WHOLE if self.partition is None else self.partition.spec(axes)

    def with_other_axes(self, shape: tuple[int, ...], other_axes: PartitionSpec) -> "Placement":
        """Return this placement for an array of this shape that is also split over other axes."""
        partition = self.partition or Partition(tuple(shape))
        return dataclasses.replace(
            self, partition=dataclasses.replace(partition, other_axes=other_axes)
        )

    def local(self, stored: jax.Array) -> jax.Array:
        """Return one shard's array, from its block of the stored array."""
        return stored[0] if self.per_shard else stored

    def stored(self, local: jax.Array) -> jax.Array:
        """Undo ``local``."""
        return local[None] if self.per_shard else local

    def stored_shape(self, shape: tuple[int, ...], number_of_shards: int) -> tuple[int, ...]:
        """Return the shape of the stored array, given the shape of the array."""
        if not self.per_shard:
            return self.partition.packed_shape if self.partition is not None else shape
        local = self.partition.local_shape if self.partition is not None else shape
        return (number_of_shards, *local)

    def pack(self, array: jax.Array) -> jax.Array:
        """Return the stored array, from the array, or from ``[shards, …]`` if it is per shard."""
        if self.partition is None or not self.is_split:
            return jnp.asarray(array)
        if self.groups is None:
            return self.partition.pack(array)
        parts = jax.vmap(self.partition.slices)(array)
        return parts[np.arange(len(array)), self.groups.position_of]

    def unpack(self, stored: jax.Array) -> jax.Array:
        """Undo ``pack``."""
        if self.partition is None or not self.is_split:
            return jnp.asarray(stored)
        if self.groups is None:
            return self.partition.unpack(stored)
        return jax.vmap(self.partition.joined)(stored[self.groups.members])[self.groups.group_of]


def stored_shapes(placements: Any, tree: Any, number_of_shards: int) -> list[tuple[int, ...]]:
    """Return the shapes of stored arrays, given the arrays; per-shard ones are ``[shards, …]``."""
    pairs = zip(*map(jax.tree.leaves, (placements, tree)), strict=True)
    return [own.stored_shape(x.shape[own.per_shard :], number_of_shards) for own, x in pairs]


# The placements of a stage's state.
REPLICATED = Placement()
"""Every shard has the same value."""
PER_SHARD = Placement(per_shard=True)
"""Each shard has a value of its own, stored as ``[shards, …]``."""


# ---- How arrays are split over other axes, such as those of a model.


def spec_over(spec: Iterable[Any], axes: Iterable[str]) -> PartitionSpec:
    """Return the spec of these axes alone, without trailing ``None``s."""
    kept = [tuple(name for name in _names(entry) if name in axes) or None for entry in spec]
    while kept and not kept[-1]:
        kept.pop()
    return PartitionSpec(*kept)


def other_axes_of(
    tree: Any, mesh: Mesh, axes: Sequence[str], *, params_sharded: bool = False
) -> tuple[PartitionSpec, ...]:
    """Return for each array of a pytree its spec on the other axes of the mesh.

    Args:
      tree: arrays, or types with shardings.
      mesh: the mesh of the step.
      axes: its shard axes.
      params_sharded: whether arrays may be split over the shards, since the parameters are sharded.

    Returns:
      One entry per leaf; empty if no array is split.

    Raises:
      ArgumentError: an array is on another mesh, or is split over the shards.
    """
    found = tuple(
        _other_axes_of(param_name(path[1:]), x, mesh, axes, params_sharded)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    )
    return found if any(found) else ()


def _other_axes_of(
    name: str, x: Any, mesh: Mesh, axes: Sequence[str], params_sharded: bool
) -> PartitionSpec:
    sharding = getattr(x, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return WHOLE
    others = [axis for axis in mesh.axis_names if axis not in axes]
    if params_sharded and not others:
        # The step moves it to its own sharding, from any devices.
        return WHOLE
    spec = getattr(sharding, "spec", None)
    found = f"{name} is sharded over devices ({sharding if spec is None else spec})"
    if not others:
        raise ArgumentError(
            f"{found}, but in this step every shard has all parameters in full. To shard "
            f"them, write make_train_step(..., params='sharded'); for a model that is split over "
            f"an axis, name the shard axes, with mesh= and axis_name=."
        )
    if not isinstance(sharding, NamedSharding) or (
        sharding.mesh.axis_names != mesh.axis_names
        or getattr(sharding.mesh, "devices", mesh.devices).tolist() != mesh.devices.tolist()
    ):
        raise ArgumentError(
            f"{found}, which is not the mesh of the step, with axes {dict(mesh.shape)}. Write "
            f"jax.device_put(params, NamedSharding(mesh, spec)), with a spec over "
            f"{', '.join(others)}."
        )
    if spec_over(sharding.spec, axes) and not params_sharded:
        raise ArgumentError(
            f"{found}, and {', '.join(axes)} is a shard axis: every shard has all parameters. "
            f"Split parameters over {', '.join(others)} only; to shard them over "
            f"{', '.join(axes)}, too, write make_train_step(..., params='sharded')."
        )
    return spec_over(sharding.spec, others)


def other_axes_like(
    state: Any, params: Any, other_axes: Sequence[PartitionSpec]
) -> tuple[PartitionSpec, ...]:
    """Return for each array of an optimizer's state the entry of its parameter, if shapes agree.

    An array belongs to the parameter whose path ends its own, as in ``mu['layer']['kernel']``.
    """
    known: dict[tuple[Any, ...], PartitionSpec] = {
        (*map(str, path), x.shape): own
        for (path, x), own in zip(
            jax.tree_util.tree_leaves_with_path(params), other_axes, strict=True
        )
        if own
    }

    def of(path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
        names = [*map(str, path)]
        ends = ((*names[start:], shape) for start in range(len(names) + 1))
        return next((known[end] for end in ends if end in known), WHOLE)

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return tuple(of(path, x.shape) if known else WHOLE for path, x in leaves)


def check_fits(params: Any, other_axes: Sequence[PartitionSpec], mesh: Mesh) -> None:
    """Raise unless a mesh can split parameters over its other axes by these specs."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, x), own in zip(leaves, other_axes, strict=False):
        try:
            NamedSharding(mesh, own).shard_shape(x.shape)
        except ValueError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ArgumentError(
                f"{param_name(path)}, of shape {x.shape}, is split as {own}, which a "
                f"mesh of {dict(mesh.shape)} cannot: {reason}. For a state of another mesh write "
                f"step.reshard(other.unshard(state))."
            ) from error


def param_name(path: tuple[Any, ...]) -> str:
    """Return the name of a parameter in messages, given its path."""
    return "params" + jax.tree_util.keystr(path).removesuffix(".value")


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or isinstance(entry, str):
        return () if entry is None else (entry,)
    return tuple(entry)


def one_for_all(x: jax.Array) -> jax.Array:
    """Return one value for all shards: the mean of floating values, else the first shard's."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    # The mean of equal values would round.
    return jnp.where((x == x[0]).all(0), x[0], x.mean(0))
