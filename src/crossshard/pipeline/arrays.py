"""What the wrapped optimizer computes on: whole arrays, this shard's parts, or global arrays."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.collectives.bucketing import bucketed_gather
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition, map_partitions


@dataclasses.dataclass(frozen=True)
class WholeArrays:
    """Every shard updates all of every array."""

    @property
    def partitions(self) -> tuple[Partition, ...] | None:
        """Per parameter how it is split; ``None`` if none is."""
        return None

    def split(self, params: Any) -> Any:
        """What the optimizer gets of whole arrays."""
        return params

    def gather(self, updated: Any) -> Any:
        """Whole arrays from what the optimizer gave back."""
        return updated

    def lay(self, gradients: Any) -> Any:
        """The reduced gradients as the optimizer gets them."""
        return gradients

    def keep(self, state: Any) -> Any:
        """The optimizer's state as it is carried on."""
        return state


@dataclasses.dataclass(frozen=True)
class LocalParts(WholeArrays):
    """Each shard updates its part of each array, and the parts are gathered.

    Attributes:
      params: per parameter how it is split.
      shards: the shards that have the parts.
      groups: the groups within which arrays are split; ``None`` for all shards together.
    """

    params: tuple[Partition, ...]
    shards: Shards
    groups: GroupAssignment | None = None

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """Per parameter how it is split."""
        return self.params

    def split(self, params: Any) -> Any:
        """This shard's parts."""
        local = lambda partition, x: partition.local_slice(x, self.shards, self.groups)
        return map_partitions(local, self.params, params)

    def gather(self, updated: Any) -> Any:
        """Whole arrays from the parts of all shards."""
        parts, tree = jax.tree.flatten(updated)
        return tree.unflatten(bucketed_gather(parts, self.params, self.shards, self.groups))


@dataclasses.dataclass(frozen=True)
class GlobalArrays(WholeArrays):
    """The update runs once, on global arrays that lie split; XLA sends what it needs.

    Attributes:
      params: per parameter how it is split.
      state: per array of the optimizer's state how it is split.
      shards: the shards that have the parts.
      mesh: the mesh they lie on.
    """

    params: tuple[Partition, ...]
    state: tuple[Partition, ...]
    shards: Shards
    mesh: Mesh

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """Per parameter how it is split."""
        return self.params

    def split(self, params: Any) -> Any:
        """The same arrays, split over the mesh."""
        return self._constrain(self.params, params)

    def gather(self, updated: Any) -> Any:
        """The same arrays, whole on every device."""
        parts, tree = jax.tree.flatten(self._constrain(self.params, updated))
        # By hand, since XLA for TPUs turns a gather over all chips into an all-reduce.
        gather = jax.shard_map(
            lambda parts: bucketed_gather(parts, self.params, self.shards),
            mesh=self.mesh,
            in_specs=([partition.spec(self.shards.axes) for partition in self.params],),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return tree.unflatten(gather(parts))

    def lay(self, gradients: Any) -> Any:
        """The gradients, split over the mesh."""
        return self._constrain(self.params, gradients)

    def keep(self, state: Any) -> Any:
        """The state, split over the mesh."""
        return self._constrain(self.state, state)

    def _constrain(self, partitions: tuple[Partition, ...], tree: Any) -> Any:
        def one(partition: Partition, x: Any) -> jax.Array:
            sharding = NamedSharding(self.mesh, partition.spec(self.shards.axes))
            return lax.with_sharding_constraint(x, sharding)

        return map_partitions(one, partitions, tree)


Arrays = WholeArrays | LocalParts | GlobalArrays
