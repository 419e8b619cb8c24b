"""The arrays of the inner optimizer: full arrays, this shard's slices, or global arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.collectives.all_reduce import sum_over_shards, widen
from crossshard.collectives.bucketing import bucketed_gather
from crossshard.gradients.scalars import is_inexact
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.model_axes import only
from crossshard.shards.partition import Partition, map_partitions, slice_index


def squared_norm(tree: Any) -> jax.Array:
    """float[]: the sum of the squares of the elements of all floating arrays."""
    return sum((_squared(leaf) for leaf in jax.tree.leaves(tree)), jnp.float32(0))


def _squared(leaf: Any) -> Any:
    if not is_inexact(leaf):
        return 0
    return jnp.sum(jnp.square(jnp.abs(widen(leaf))))


@dataclasses.dataclass(frozen=True)
class WholeArrays:
    """Every shard updates every array in full."""

    @property
    def partitions(self) -> tuple[Partition, ...] | None:
        """The partition of each parameter; ``None`` if none is split."""
        return None

    @property
    def is_local(self) -> bool:
        """Whether each shard sees only its slices."""
        return False

    def squared_norm(self, tree: Any) -> jax.Array:
        """float[]: the squared norm of arrays that are split like the parameters."""
        return squared_norm(tree)

    def split(self, params: Any) -> Any:
        """The parameters as the optimizer takes them."""
        return params

    def gather(self, updated: Any) -> Any:
        """Full arrays from those that the optimizer returned."""
        return updated

    def place_gradients(self, gradients: Any) -> Any:
        """The reduced gradients as the optimizer takes them."""
        return gradients

    def place_state(self, state: Any) -> Any:
        """The optimizer's state as the next step takes it."""
        return state


@dataclasses.dataclass(frozen=True)
class LocalParts(WholeArrays):
    """Each shard updates its slice of each array, and the slices are all-gathered.

    Attributes:
      params: the partition of each parameter.
      shards: the shards that have the slices.
      groups: the groups within which arrays are split; ``None`` for all shards.
    """

    params: tuple[Partition, ...]
    shards: Shards
    groups: GroupAssignment | None = None

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partition of each parameter."""
        return self.params

    @property
    def is_local(self) -> bool:
        """Each shard sees only its slices."""
        return True

    def squared_norm(self, tree: Any) -> jax.Array:
        """float[]: the squared norm of the arrays of which this shard has slices."""
        leaves = jax.tree.leaves(tree)
        pairs = list(zip(leaves, self.params, strict=True))
        own = squared_norm([leaf for leaf, partition in pairs if partition.number > 1])
        whole = squared_norm([leaf for leaf, partition in pairs if partition.number == 1])
        return sum_over_shards(own, self.shards, self.groups) + whole

    def split(self, params: Any) -> Any:
        """This shard's slices."""
        index = slice_index(self.shards, self.groups)
        local = lambda partition, x: partition.local_slice(x, index)
        return map_partitions(local, self.params, params)

    def gather(self, updated: Any) -> Any:
        """Full arrays from the slices of all shards."""
        parts, tree = jax.tree.flatten(updated)
        return tree.unflatten(bucketed_gather(parts, self.params, self.shards, self.groups))


@dataclasses.dataclass(frozen=True)
class GlobalArrays(WholeArrays):
    """The update runs once, on sharded global arrays; XLA inserts the communication.

    Attributes:
      params: the partition of each parameter.
      state: the partition of each array of the optimizer's state.
      shards: the shards that have the slices.
      mesh: their mesh.
    """

    params: tuple[Partition, ...]
    state: tuple[Partition, ...]
    shards: Shards
    mesh: Mesh

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partition of each parameter."""
        return self.params

    def split(self, params: Any) -> Any:
        """The same arrays, sharded over the mesh."""
        return self._constrain(self.params, params)

    def gather(self, updated: Any) -> Any:
        """The same arrays, replicated on every device."""
        parts, tree = jax.tree.flatten(self._constrain(self.params, updated))
        axes = self.shards.axes
        # Explicit, since XLA for TPUs turns an all-gather over all chips into an all-reduce.
        gather = jax.shard_map(
            lambda parts: bucketed_gather(parts, self.params, self.shards),
            mesh=self.mesh,
            axis_names=frozenset(axes),
            in_specs=(
                [PartitionSpec(*only(partition.spec(axes), axes)) for partition in self.params],
            ),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return tree.unflatten(gather(parts))

    def place_gradients(self, gradients: Any) -> Any:
        """The gradients, sharded over the mesh."""
        return self._constrain(self.params, gradients)

    def place_state(self, state: Any) -> Any:
        """The state, sharded over the mesh."""
        return self._constrain(self.state, state)

    def _constrain(self, partitions: tuple[Partition, ...], tree: Any) -> Any:
        def one(partition: Partition, x: Any) -> jax.Array:
            sharding = NamedSharding(self.mesh, partition.spec(self.shards.axes))
            return lax.with_sharding_constraint(x, sharding)

        return map_partitions(one, partitions, tree)


Arrays = WholeArrays | LocalParts | GlobalArrays
