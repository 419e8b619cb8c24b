"""Arrays: how the arrays of an update are split over the shards, and where the update runs."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard.collectives.sums import bucketed_gather, sum_over_shards, widen
from crossshard.gradients.status import inside_optimizer
from crossshard.shards.axes import Shards
from crossshard.shards.cut import Partition, map_partitions, spec_over

# An optimizer's update, of gradients, state and parameters.
Update = Callable[[Any, Any, Any], tuple[Any, Any]]


class Arrays(abc.ABC):
    """The plan of an update: how its arrays are split, and where it runs. It holds no arrays."""

    where: ClassVar[str]  # where the update runs, for ``describe()``
    # The update and what follows it, for ``Pipeline.describe``.
    steps: ClassVar[tuple[str, ...]]
    # The partition of each parameter, in which its gradient is reduced and its update returned.
    params: tuple[Partition, ...]
    state: tuple[Partition, ...]  # the partition of each array of the optimizer's state
    # For each parameter, whether computing and sending its gradient can be left out.
    unread: tuple[bool, ...]
    params_sharded: bool  # whether the parameters are sharded

    @abc.abstractmethod
    def split(self, tree: Any) -> Any:
        """Split full parameters as the optimizer takes them; sharded ones are already split."""

    @abc.abstractmethod
    def gather(self, tree: Any) -> Any:
        """Gather what the optimizer returned; sharded parameters stay split."""

    def partitions_of(self, gradients: Any) -> Sequence[Partition]:
        """Return the partition of each gradient, as it is reduced."""
        del gradients
        return self.params

    def squared_norm(self, tree: Any) -> Float[Array, ""]:
        """Return the squared norm of arrays that are split as the optimizer takes them."""
        return squared_norm(tree)

    def to_owners(self, gradients: Any) -> Any:
        """Lay out gradients for the reduction: see ``Owners``, where blocks have an owner shard."""
        return gradients

    def from_owners(self, gradients: Any) -> Any:
        """Undo ``to_owners``."""
        return gradients

    def run(
        self, update: Update, gradients: Any, state: Any, params: Any, loss: Any, opaque_false: Any
    ) -> tuple[Any, Any]:
        """Return the optimizer's updates, and its next state.

        Args:
          update: the optimizer's own.
          gradients: the reduced gradients.
          state: the optimizer's state.
          params: the parameters, as ``split`` returns them.
          loss: float[], the loss; only updates that run leaf by leaf read it.
          opaque_false: ``StageContext.opaque_false``; only such updates read it, too.
        """
        del loss, opaque_false
        with inside_optimizer():
            return update(gradients, state, params)


@dataclasses.dataclass(frozen=True)
class Replicated(Arrays):
    """Every shard updates all arrays in full. Partitions are empty if they are not known."""

    params: tuple[Partition, ...] = ()
    state: tuple[Partition, ...] = ()
    unread: tuple[bool, ...] = ()
    params_sharded: bool = False
    shards: Shards | None = None  # the shards; ``None`` if they are not known
    # Runs the update leaf by leaf, each leaf in a program of its own, so that bits do not depend on
    # the number of shards; ``None`` to run the optimizer as it is.
    leaf_by_leaf: Arrays | None = None

    where = "replicated"
    steps = ("update on every shard",)

    def partitions_of(self, gradients: Any) -> Sequence[Partition]:
        """Return partitions that split nothing, from the gradients if none are known."""
        shapes = map(jnp.shape, jax.tree.leaves(gradients))
        return self.params or [Partition(shape) for shape in shapes]

    def split(self, tree: Any) -> Any:
        return tree

    def gather(self, tree: Any) -> Any:
        """Return the arrays, split over the other axes of the mesh as they were."""
        if self.params_sharded or self.shards is None or not self.shards.other_axes:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(bucketed_gather(leaves, self.params, self.shards))

    def run(self, *args: Any) -> tuple[Any, Any]:
        return super().run(*args) if self.leaf_by_leaf is None else self.leaf_by_leaf.run(*args)


@dataclasses.dataclass(frozen=True)
class Sharded(Arrays):
    """Each shard updates its slice of each array; slices of replicated parameters are gathered."""

    params: tuple[Partition, ...]
    shards: Shards
    state: tuple[Partition, ...] = ()
    unread: tuple[bool, ...] = ()
    params_sharded: bool = False

    where = "sharded"
    steps = ("sharded update", "gather")

    def squared_norm(self, tree: Any) -> Float[Array, ""]:
        """Return the squared norm of the arrays of which this shard has slices."""
        return squared_norm_of_slices(tree, self.params, self.shards)

    def split(self, tree: Any) -> Any:
        if self.params_sharded:
            return tree
        index = self.shards.index_in_group()
        local = lambda partition, x: partition.local_slice(x, index)
        return map_partitions(local, self.params, tree)

    def gather(self, tree: Any) -> Any:
        """Gather full arrays from the slices of all shards; sharded parameters stay split."""
        if self.params_sharded:
            return tree
        parts, structure = jax.tree.flatten(tree)
        whole = bucketed_gather(parts, self.params, self.shards)
        return structure.unflatten(whole)


@dataclasses.dataclass(frozen=True)
class Global(Arrays):
    """The update runs once, on sharded global arrays; XLA inserts the communication."""

    params: tuple[Partition, ...]
    state: tuple[Partition, ...]
    shards: Shards
    mesh: Mesh
    unread: tuple[bool, ...] = ()
    params_sharded: bool = False

    where = "on sharded global arrays"
    steps = ("update on sharded global arrays", "gather")

    def split(self, tree: Any) -> Any:
        """Shard the arrays over the mesh."""
        return self._constrain(self.params, tree)

    def gather(self, tree: Any) -> Any:
        """Replicate the arrays on every device, unless they are kept sharded."""
        split = self.split(tree)
        if self.params_sharded:
            return split
        parts, structure = jax.tree.flatten(split)
        axes = self.shards.axes
        # Explicit, since XLA for TPUs turns an all-gather over all chips into an all-reduce.
        gather = _jax.shard_map(
            lambda parts: bucketed_gather(parts, self.params, self.shards),
            mesh=self.mesh,
            axis_names=frozenset(axes),
            in_specs=([spec_over(each.spec(axes), axes) for each in self.params],),
            out_specs=PartitionSpec(),
        )
        return structure.unflatten(gather(parts))

    def run(self, update: Update, gradients: Any, *args: Any) -> tuple[Any, Any]:
        """Return the optimizer's updates, and its next state, sharded over the mesh."""
        updates, state = super().run(update, self.split(gradients), *args)
        return updates, self._constrain(self.state, state)

    def _constrain(self, partitions: tuple[Partition, ...], tree: Any) -> Any:
        def one(partition: Partition, x: Any) -> jax.Array:
            sharding = NamedSharding(self.mesh, partition.spec(self.shards.axes))
            return lax.with_sharding_constraint(x, sharding)

        return map_partitions(one, partitions, tree)


def squared_norm(tree: Any) -> Float[Array, ""]:
    """Return the sum of the squares of the elements of all floating arrays."""
    total = jnp.float32(0)
    for leaf in filter(is_inexact, jax.tree.leaves(tree)):
        total += jnp.sum(jnp.square(jnp.abs(widen(leaf))))
    return total


def squared_norm_of_slices(
    tree: Any, partitions: Sequence[Partition], shards: Shards
) -> Float[Array, ""]:
    """Return the squared norm of arrays of which each shard, or each of a group, has its slices."""
    pairs = list(zip(jax.tree.leaves(tree), partitions, strict=True))
    own = squared_norm([_unpadded(*pair, shards) for pair in pairs if pair[1].number > 1])
    whole = squared_norm([leaf for leaf, partition in pairs if partition.number == 1])
    return sum_over_shards(own, shards) + whole


def _unpadded(x: Any, partition: Partition, shards: Shards) -> Any:
    """Return a slice with zeros as its padding, where an update may have written anything."""
    size, number = math.prod(partition.local_shape), math.prod(partition.shape)
    if size * partition.number == number:
        return x
    left = number - shards.index_in_group() * size
    return jnp.where((jnp.arange(size) < left).reshape(partition.local_shape), x, 0)
