"""The arrays of the inner optimizer: full arrays, this shard's slices, or global arrays."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from crossshard import _jax
from crossshard.collectives.bucketing import bucketed_gather
from crossshard.collectives.sums import sum_over_shards, widen
from crossshard.gradients.nesting import inside_optimizer
from crossshard.gradients.scalars import is_inexact
from crossshard.pipeline.update.dealt import Dealt
from crossshard.pipeline.update.leaf_by_leaf import update_leaf_by_leaf
from crossshard.shards import rows
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.model_axes import only
from crossshard.shards.partition import Partition, map_partitions


def squared_norm(tree: Any) -> Float[Array, ""]:
    """The sum of the squares of the elements of all floating arrays."""
    return sum((_squared(leaf) for leaf in jax.tree.leaves(tree)), jnp.float32(0))


def _squared(leaf: Any) -> Any:
    if not is_inexact(leaf):
        return 0
    return jnp.sum(jnp.square(jnp.abs(widen(leaf))))


class Arrays:
    """The arrays of an optimizer: whole ones, of which every shard updates all.

    Attributes:
      is_local: whether each shard sees only its slices.
      at_rest: whether the parameters are given, and kept, in parts.
    """

    is_local = False
    at_rest: bool = False

    def partitions_of(self, params: Any) -> Sequence[Partition]:
        """The partition of each parameter."""
        return [Partition(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]

    def squared_norm(self, tree: Any) -> Float[Array, ""]:
        """The squared norm of arrays that are split like the parameters."""
        return squared_norm(tree)

    def split(self, tree: Any) -> Any:
        """The parameters as the optimizer takes them."""
        return tree

    def gather(self, tree: Any) -> Any:
        """Full arrays from those that the optimizer returned."""
        return tree

    def arranged(self, gradients: Any) -> Any:
        """The gradients as they are reduced: arrays in the place of the parameters."""
        return gradients

    def disarranged(self, gradients: Any) -> Any:
        """The inverse of ``arranged``."""
        return gradients

    def place_gradients(self, tree: Any) -> Any:
        """The reduced gradients as the optimizer takes them."""
        return tree

    def place_state(self, tree: Any) -> Any:
        """The optimizer's state as the next step takes it."""
        return tree

    def run(
        self,
        optimizer: optax.GradientTransformationExtraArgs,
        gradients: Any,
        state: Any,
        params: Any,
        extra_args: Mapping[str, Any],
        *,
        never: Any = None,
    ) -> tuple[Any, Any]:
        """The optimizer's updates, and its next state.

        ``never`` is that of the context, for arrays that compute each leaf apart from the others.
        """
        del never
        with inside_optimizer():
            found: tuple[Any, Any] = optimizer.update(gradients, state, params, **extra_args)
            return found


class _LeafByLeaf(Arrays):
    """Arrays that are updated leaf by leaf.

    Attributes:
      dealt: the leaves, and who owns which.
      shards: the shards.
    """

    dealt: Dealt
    shards: Shards

    def run(
        self,
        optimizer: optax.GradientTransformationExtraArgs,
        gradients: Any,
        state: Any,
        params: Any,
        extra_args: Mapping[str, Any],
        *,
        never: Any = None,
    ) -> tuple[Any, Any]:
        """The optimizer's updates, leaf by leaf, and its next state."""
        del optimizer
        (reduced, tree), (arrays, structure) = map(jax.tree.flatten, (gradients, state))
        loss = extra_args.get("value", jnp.float32(0))
        own = jax.tree.leaves(params)
        updates, after = update_leaf_by_leaf(
            self.dealt, self.shards, reduced, arrays, own, [loss], never
        )
        return tree.unflatten(updates), structure.unflatten(after)


@dataclasses.dataclass(frozen=True)
class WholeLeaves(_LeafByLeaf):
    """Whole arrays, of which every shard updates all: no leaf is cut, and none has an owner."""

    dealt: Dealt
    shards: Shards


@dataclasses.dataclass(frozen=True)
class LocalParts(Arrays):
    """Each shard updates its slice of each array, and the slices are all-gathered.

    Attributes:
      partitions: the partition of each parameter.
      shards: the shards that have the slices.
      groups: the groups within which arrays are split; ``None`` for all shards.
      at_rest: whether the parameters are given, and kept, as slices.
    """

    partitions: tuple[Partition, ...]
    shards: Shards
    groups: GroupAssignment | None = None
    at_rest: bool = False

    is_local = True

    def partitions_of(self, params: Any) -> Sequence[Partition]:
        """Those of the plan."""
        del params
        return self.partitions

    def squared_norm(self, tree: Any) -> Float[Array, ""]:
        """The squared norm of the arrays of which this shard has slices."""
        leaves = jax.tree.leaves(tree)
        pairs = list(zip(leaves, self.partitions, strict=True))
        own = squared_norm([leaf for leaf, partition in pairs if partition.number > 1])
        whole = squared_norm([leaf for leaf, partition in pairs if partition.number == 1])
        return sum_over_shards(own, self.shards.within(self.groups)) + whole

    def split(self, tree: Any) -> Any:
        """This shard's slices."""
        if self.at_rest:
            return tree
        index = self.shards.within(self.groups).position()
        local = lambda partition, x: partition.local_slice(x, index)
        return map_partitions(local, self.partitions, tree)

    def gather(self, tree: Any) -> Any:
        """Full arrays from the slices of all shards, unless they rest so."""
        if self.at_rest:
            return tree
        parts, structure = jax.tree.flatten(tree)
        whole = bucketed_gather(parts, self.partitions, self.shards.within(self.groups))
        return structure.unflatten(whole)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DealtParts(_LeafByLeaf, LocalParts):
    """Each shard updates its slices of some arrays, and all of others, which it owns.

    Attributes:
      partitions: those of ``dealt``, with arrays that travel to their owners in rows.
      dealt: who owns what.
    """

    dealt: Dealt

    def arranged(self, gradients: Any) -> Any:
        """The gradients, with those that travel to their owners in rows."""
        leaves, tree = jax.tree.flatten(gradients)
        return tree.unflatten(rows.pack(self.dealt.rows, leaves))

    def disarranged(self, gradients: Any) -> Any:
        """The gradients in their own shapes."""
        leaves, tree = jax.tree.flatten(gradients)
        return tree.unflatten(rows.unpack(self.dealt.rows, leaves))

    def split(self, tree: Any) -> Any:
        """This shard's slices, and its rows."""
        if self.at_rest:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        index = self.shards.position()
        pairs = zip(self.dealt.params, leaves, strict=True)
        slices = [partition.local_slice(x, index) for partition, x in pairs]
        return structure.unflatten(rows.pack_own(self.dealt.rows, slices, index))

    def gather(self, tree: Any) -> Any:
        """Full arrays from the slices and rows of all shards, unless they rest so."""
        leaves, structure = jax.tree.flatten(super().gather(tree))
        return structure.unflatten(rows.unpack(self.dealt.rows, leaves))


@dataclasses.dataclass(frozen=True)
class GlobalArrays(Arrays):
    """The update runs once, on sharded global arrays; XLA inserts the communication.

    Attributes:
      partitions: the partition of each parameter.
      state: the partition of each array of the optimizer's state.
      shards: the shards that have the slices.
      mesh: their mesh.
      at_rest: whether the parameters stay sharded over the mesh.
    """

    partitions: tuple[Partition, ...]
    state: tuple[Partition, ...]
    shards: Shards
    mesh: Mesh
    at_rest: bool = False

    def partitions_of(self, params: Any) -> Sequence[Partition]:
        """Those of the plan."""
        del params
        return self.partitions

    def split(self, tree: Any) -> Any:
        """The same arrays, sharded over the mesh."""
        return self._constrain(self.partitions, tree)

    def gather(self, tree: Any) -> Any:
        """The same arrays, replicated on every device, unless they stay sharded."""
        split = self._constrain(self.partitions, tree)
        if self.at_rest:
            return split
        parts, structure = jax.tree.flatten(split)
        axes = self.shards.axes
        # Explicit, since XLA for TPUs turns an all-gather over all chips into an all-reduce.
        gather = _jax.shard_map(
            lambda parts: bucketed_gather(parts, self.partitions, self.shards),
            mesh=self.mesh,
            axis_names=frozenset(axes),
            in_specs=([PartitionSpec(*only(each.spec(axes), axes)) for each in self.partitions],),
            out_specs=PartitionSpec(),
        )
        return structure.unflatten(gather(parts))

    place_gradients = split

    def place_state(self, tree: Any) -> Any:
        """The state, sharded over the mesh."""
        return self._constrain(self.state, tree)

    def _constrain(self, partitions: tuple[Partition, ...], tree: Any) -> Any:
        def one(partition: Partition, x: Any) -> jax.Array:
            sharding = NamedSharding(self.mesh, partition.spec(self.shards.axes))
            return lax.with_sharding_constraint(x, sharding)

        return map_partitions(one, partitions, tree)
