"""Arrays cut into one part per shard: how they are cut, and what is taken, gathered and stored."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from crossshard import _jax
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment

# Fewer elements are kept whole on every shard: their parts would save less than they cost.
_FEW = 1024
# Fewer travel in a bucket: a collective costs more to start than they cost to copy.
_SMALL = 1 << 15


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the collectives of a platform ask of the parts that they scatter.

    Attributes:
      rows: the fewest rows of a part.
      lanes: the elements of a row.
    """

    rows: int = 1
    lanes: int = 1

    @property
    def tile(self) -> int:
        """The elements of the smallest part that travels alone."""
        return self.rows * self.lanes


ANY = Limits()
# On fewer rows, or on one-dimensional arrays, XLA for TPUs takes the whole sum and slices it: seen
# in the compiled programs of v5e, v6e and v5p slices.
TPU = Limits(rows=16, lanes=128)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an array of some shape is cut into one part per shard.

    Along an axis; or the elements are dealt out in their order, padded with zeros, as many
    dimensions as the whole has, because update rules ask for them.

    Attributes:
      shape: of the whole.
      number: how many parts; 1 for an array that every shard keeps whole.
      axis: along which axis; ``None`` for elements in their order.
      limits: what the platform asks.
    """

    shape: tuple[int, ...]
    number: int = 1
    axis: int | None = 0
    limits: Limits = ANY

    @property
    def _elements(self) -> int:
        """Of one part, in order, without padding."""
        return -(-math.prod(self.shape) // self.number)

    @property
    def _in_tiles(self) -> bool:
        # Less would be padding for the most part; it travels in a bucket, which is padded once.
        return self.axis is None and self._elements >= 8 * self.limits.tile > 8

    @property
    def is_small(self) -> bool:
        """Whether it travels in a bucket with others, if it lies in the order of its elements."""
        if self.axis:
            return False
        if self.limits.tile > 1 and self.number > 1:
            enough = len(self.shape) > 1 and self.part_shape[0] >= self.limits.rows
            return not (self._in_tiles or (self.axis == 0 and enough))
        return math.prod(self.shape) < _SMALL

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one part."""
        if self.number == 1:
            return self.shape
        if self.axis is not None:
            length = self.shape[self.axis] // self.number
            return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])
        if not self._in_tiles:
            return (self._elements, *[1] * (len(self.shape) - 1))
        tiles, lanes = -(-self._elements // self.limits.tile), self.limits.lanes
        if len(self.shape) == 1:
            return (tiles * self.limits.tile,)
        return (tiles * self.limits.rows, *[1] * (len(self.shape) - 2), lanes)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of all parts side by side, which is how they are stored."""
        if self.number == 1 or self.axis is not None:
            return self.shape
        return (self.number * self.part_shape[0], *self.part_shape[1:])

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """How the stored parts lie on a mesh with these axes."""
        if self.number == 1:
            return PartitionSpec()
        return PartitionSpec(*[None] * (self.axis or 0), axes)

    def stored(self, whole: Any) -> jax.Array:
        """The parts of an array, side by side."""
        if self.number == 1 or self.axis is not None:
            return jnp.asarray(whole)
        flat = jnp.ravel(whole)
        padded = jnp.pad(flat, (0, math.prod(self.stored_shape) - flat.size))
        return padded.reshape(self.stored_shape)

    def whole(self, stored: Any) -> jax.Array:
        """The reverse of ``stored``."""
        if self.number == 1 or self.axis is not None:
            return jnp.asarray(stored)
        return jnp.ravel(stored)[: math.prod(self.shape)].reshape(self.shape)

    def own(self, whole: Any, shards: Shards, groups: GroupAssignment | None = None) -> jax.Array:
        """This shard's part of an array that it has whole."""
        if self.number == 1:
            return jnp.asarray(whole)
        axis = self.axis or 0
        length = self.part_shape[axis]
        start = _place(shards, groups) * length
        return lax.dynamic_slice_in_dim(self.stored(whole), start, length, axis)


def cut_for(shape: Sequence[int], number: int, limits: Limits = ANY) -> Cut:
    """A cut that moves no element: along axis 0 or in order; tiny arrays stay whole."""
    shape = tuple(shape)
    if math.prod(shape) < _FEW or number == 1:
        return Cut(shape)
    flat = len(shape) == 1 and limits.lanes > 1
    in_rows = shape[0] % number == 0 and shape[0] // number >= limits.rows and not flat
    return Cut(shape, number, 0 if in_rows else None, limits)


def cut_along_axis(shape: Sequence[int], number: int, limits: Limits = ANY) -> Cut:
    """A cut that leaves the shape as it is; arrays without an axis that divides stay whole."""
    whole = Cut(tuple(shape))
    if math.prod(shape) < _FEW or number == 1:
        return whole
    axes = (axis for axis, length in enumerate(shape) if length % number == 0)
    return next((Cut(tuple(shape), number, axis, limits) for axis in axes), whole)


def _place(shards: Shards, groups: GroupAssignment | None) -> jax.Array:
    """int32[]: which of the parts is this shard's."""
    index = shards.index()
    return index if groups is None else jnp.asarray(groups.position_of)[index]


def scatter_sum(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """This shard's part along an axis of the sum over the shards, or over its group."""
    for name, members in _stages(shards, groups):
        over: Any = {"axis_index_groups": members, "tiled": True}
        x = lax.psum_scatter(x, name, scatter_dimension=axis, **over)
    return x


def gather_parts(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """The parts of all shards, or of the group, side by side along an axis.

    Typed as equal on all shards where no group makes it differ.
    """
    for name, members in reversed(_stages(shards, groups)):
        if members is None:
            x = _jax.all_gather(x, name, axis, tracked=shards.tracked)
        else:
            x = lax.all_gather(x, name, axis=axis, axis_index_groups=members, tiled=True)
    return x


def _stages(shards: Shards, groups: GroupAssignment | None) -> list[Any]:
    return shards.stages() if groups is None else [(shards.axes, groups.members.tolist())]
