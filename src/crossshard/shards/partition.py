"""Partition: how one array is split into a part per shard, and packed and unpacked."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment

# Fewer elements are kept whole on every shard: their parts would save less than they cost.
_FEW = 1024
# Fewer travel in a bucket: a collective costs more to start than they cost to copy.
_SMALL = 1 << 15


@dataclasses.dataclass(frozen=True)
class TileShape:
    """The smallest part that a platform's collectives scatter well.

    Attributes:
      rows: the fewest rows of a part.
      lanes: the elements of a row.
    """

    rows: int = 1
    lanes: int = 1

    @property
    def size(self) -> int:
        """The number of elements of a tile."""
        return self.rows * self.lanes


ANY = TileShape()
# On fewer rows, or on one-dimensional arrays, XLA for TPUs takes the whole sum and slices it: seen
# in the compiled programs of v5e, v6e and v5p slices.
TPU = TileShape(rows=16, lanes=128)


@dataclasses.dataclass(frozen=True)
class Partition:
    """How an array is split into one part per shard.

    Either along an axis, or by its flattened elements, padded with zeros. A part always has as many
    dimensions as the array, because optimizers look at that number.

    Attributes:
      shape: the shape of the array.
      number: the number of parts; 1 for an array that every shard keeps whole.
      axis: the axis to split; ``None`` to split the flattened elements.
      tile: the smallest part that the platform's collectives scatter well.
    """

    shape: tuple[int, ...]
    number: int = 1
    axis: int | None = 0
    tile: TileShape = ANY

    @property
    def _elements(self) -> int:
        """The number of elements of one part, without padding."""
        return -(-math.prod(self.shape) // self.number)

    @property
    def _in_tiles(self) -> bool:
        # A smaller part would be mostly padding; it travels in a bucket, which is padded once.
        return self.axis is None and self._elements >= 8 * self.tile.size > 8

    @property
    def is_small(self) -> bool:
        """Whether the array travels in a bucket with others."""
        if self.axis:
            return False
        if self.tile.size > 1 and self.number > 1:
            enough = len(self.shape) > 1 and self.local_shape[0] >= self.tile.rows
            return not (self._in_tiles or (self.axis == 0 and enough))
        return math.prod(self.shape) < _SMALL

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one part."""
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
        """The shape of all parts side by side."""
        if self.number == 1 or self.axis is not None:
            return self.shape
        return (self.number * self.local_shape[0], *self.local_shape[1:])

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """How the packed array lies on a mesh, given the axes that count shards."""
        if self.number == 1:
            return PartitionSpec()
        return PartitionSpec(*[None] * (self.axis or 0), axes)

    def pack(self, array: Any) -> jax.Array:
        """The parts of an array, side by side."""
        if self.number == 1 or self.axis is not None:
            return jnp.asarray(array)
        flat = jnp.ravel(array)
        padded = jnp.pad(flat, (0, math.prod(self.packed_shape) - flat.size))
        return padded.reshape(self.packed_shape)

    def unpack(self, packed: Any) -> jax.Array:
        """The inverse of ``pack``."""
        if self.number == 1 or self.axis is not None:
            return jnp.asarray(packed)
        return jnp.ravel(packed)[: math.prod(self.shape)].reshape(self.shape)

    def local_slice(
        self, array: Any, shards: Shards, groups: GroupAssignment | None = None
    ) -> jax.Array:
        """This shard's part of an array that it has whole."""
        if self.number == 1:
            return jnp.asarray(array)
        axis = self.axis or 0
        length = self.local_shape[axis]
        index = shards.index()
        place = index if groups is None else jnp.asarray(groups.position_of)[index]
        return lax.dynamic_slice_in_dim(self.pack(array), place * length, length, axis)


def partition_for(shape: Sequence[int], number: int, tile: TileShape = ANY) -> Partition:
    """A partition that moves no element: along axis 0 or flattened; tiny arrays stay whole."""
    shape = tuple(shape)
    if math.prod(shape) < _FEW or number == 1:
        return Partition(shape)
    flat = len(shape) == 1 and tile.lanes > 1
    in_rows = shape[0] % number == 0 and shape[0] // number >= tile.rows and not flat
    return Partition(shape, number, 0 if in_rows else None, tile)


def partition_along_axis(shape: Sequence[int], number: int, tile: TileShape = ANY) -> Partition:
    """A partition that keeps the shape; arrays without an axis that divides stay whole."""
    whole = Partition(tuple(shape))
    if math.prod(shape) < _FEW or number == 1:
        return whole
    axes = (axis for axis, length in enumerate(shape) if length % number == 0)
    return next((Partition(tuple(shape), number, axis, tile) for axis in axes), whole)


def map_partitions(
    function: Callable[[Partition, Any], Any], partitions: Sequence[Partition], tree: Any
) -> Any:
    """A pytree of ``function(partition, leaf)`` for each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([function(*pair) for pair in zip(partitions, leaves, strict=True)])
