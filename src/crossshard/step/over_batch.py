"""OverBatch: one loss of all rows and its gradient, on global arrays whose work XLA splits."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.axes import Shards
from crossshard.shards.model_axes import only
from crossshard.shards.partition import Partition, map_partitions
from crossshard.step.arguments import check_not_of_shards
from crossshard.step.at_use import AtUse
from crossshard.step.leaf import dtype_sent
from crossshard.step.microbatches import LocalResult
from crossshard.step.shard_loss import ShardLoss


@dataclasses.dataclass(frozen=True)
class OverBatch:
    """The loss over the batch of a step, outside of ``shard_map``.

    Attributes:
      loss: the loss.
      layout: the layout of the state.
      unread: for each parameter, whether its gradient is not to be computed; empty for none.
      gather_dtype: the dtype in which parameters that rest in parts are gathered; ``None`` for
        their own.
    """

    loss: ShardLoss
    layout: StateLayout
    unread: tuple[bool, ...] = ()
    gather_dtype: Any = None

    def gradient(self, state: TrainState, batch: Any, scale: Any) -> LocalResult:
        """The loss and its gradient, which is that of the batch and needs no reduction.

        Gradients of which each shard updates a slice come in these slices, so that XLA may sum into
        them what its devices computed.

        Args:
          state: the state, of global arrays.
          batch: the batch, its rows split over the shards.
          scale: float[], the loss scale; ``None`` without one.

        Raises:
          AxisError: the loss names a shard axis.
        """
        plan, layout = self.layout.plan, self.layout
        # One shard, which has all rows: the key does not depend on the number of shards, either.
        one = AtUse(plan.params, Shards(1), unread=self.unread, waits=True)
        # Gathered before it is differentiated, or XLA would gather the gradient, too.
        whole = dataclasses.replace(
            state,
            params=self._whole(plan.params, state.params),
            frozen=self._whole(layout.partitions_of_frozen(state.frozen), state.frozen),
        )
        try:
            found = self.loss.local_gradient(whole, batch, one, scale)
        except NameError as error:
            check_not_of_shards(error, layout.axes)
            raise
        early = tuple(each.number > 1 for each in plan.params)
        leaves, tree = jax.tree.flatten(found.values)
        values = [
            self._constrained(each.pack(x), each.spec(layout.axes))
            for x, each in zip(leaves, plan.params, strict=True)
        ]
        return found._replace(values=tree.unflatten(values), early=early)

    def specs(self, values: Any) -> Any:
        """The specs with which gradients enter ``shard_map``."""
        axes = self.layout.axes
        of_one = lambda each, _: only(each.spec(axes), axes)
        return map_partitions(of_one, self.layout.plan.params, values)

    def _whole(self, partitions: tuple[Partition, ...], tree: Any) -> Any:
        """Arrays that rest in parts, gathered."""

        def one(each: Partition, x: Any) -> Any:
            if not self.layout.plan.in_parts or each.number == 1:
                return x
            sent = x.astype(dtype_sent(x.dtype, self.gather_dtype))
            sent = self._constrained(sent, each.spec(self.layout.axes))
            return self._constrained(sent, each.other_axes).astype(x.dtype)

        return map_partitions(one, partitions, tree)

    def _constrained(self, x: Any, spec: PartitionSpec) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.layout.mesh, spec))
