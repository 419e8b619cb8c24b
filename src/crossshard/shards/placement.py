"""Placement: how one array is placed on the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import WHOLE, Partition


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
        """The ``PartitionSpec`` of the stored array, given the shard axes."""
        if self.per_shard:
            return PartitionSpec(axes, *self.other_axes)
        return WHOLE if self.partition is None else self.partition.spec(axes)

    def beside(self, shape: tuple[int, ...], other_axes: PartitionSpec) -> "Placement":
        """The same, for an array of a shape that is split over other axes, too."""
        partition = self.partition or Partition(tuple(shape))
        return dataclasses.replace(
            self, partition=dataclasses.replace(partition, other_axes=other_axes)
        )

    def local(self, stored: jax.Array) -> jax.Array:
        """One shard's array, from its block of the stored array."""
        return stored[0] if self.per_shard else stored

    def stored(self, local: jax.Array) -> jax.Array:
        """The inverse of ``local``."""
        return local[None] if self.per_shard else local

    def stored_shape(self, shape: tuple[int, ...], number_of_shards: int) -> tuple[int, ...]:
        """The shape of the stored array, given the shape of the array."""
        if not self.per_shard:
            return self.partition.packed_shape if self.partition is not None else shape
        local = self.partition.local_shape if self.partition is not None else shape
        return (number_of_shards, *local)

    def pack(self, array: jax.Array) -> jax.Array:
        """The stored array, from the array, or from ``[shards, …]`` if there is one per shard."""
        if self.partition is None or not self.is_split:
            return jnp.asarray(array)
        if self.groups is None:
            return self.partition.pack(array)
        number, shape = self.partition.number, self.partition.local_shape
        if self.partition.axis:
            parts = jnp.stack(jnp.split(array, number, self.partition.axis + 1), 1)
        else:
            parts = jax.vmap(self.partition.pack)(array).reshape(array.shape[0], number, *shape)
        return parts[np.arange(array.shape[0]), self.groups.position_of]

    def unpack(self, stored: jax.Array) -> jax.Array:
        """The inverse of ``pack``."""
        if self.partition is None or not self.is_split:
            return jnp.asarray(stored)
        if self.groups is None:
            return self.partition.unpack(stored)
        of_groups = stored[self.groups.members]
        if self.partition.axis:
            along = self.partition.axis + 1
            of_groups = jnp.concatenate(list(jnp.moveaxis(of_groups, 1, 0)), along)
        of_groups = of_groups.reshape(-1, *self.partition.packed_shape)
        return jax.vmap(self.partition.unpack)(of_groups)[self.groups.group_of]


# The placements of a stage's state.
REPLICATED = Placement()
"""Every shard has the same value."""
PER_SHARD = Placement(per_shard=True)
"""Each shard has a value of its own, stored as ``[shards, …]``."""
