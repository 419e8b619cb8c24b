"""OverBatch: one loss of all rows and its gradient, on global arrays whose work XLA splits."""

import dataclasses
from typing import Any

import jax

from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.model_axes import only
from crossshard.shards.partition import map_partitions
from crossshard.step.arguments import check_not_of_shards
from crossshard.step.at_use import AtUse
from crossshard.step.leaf import OnMesh
from crossshard.step.microbatches import LocalResult
from crossshard.step.shard_loss import ShardLoss


@dataclasses.dataclass(frozen=True)
class OverBatch:
    """The loss over the batch of a step, outside of ``shard_map``.

    Attributes:
      loss: the loss.
      layout: the layout of the state.
      at_use: how a shard would get its parameters.
    """

    loss: ShardLoss
    layout: StateLayout
    at_use: AtUse

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
        partitions = self.layout.plan.params
        on_mesh = OnMesh(self.layout.mesh, self.layout.axes)
        at_use = self.at_use.over_batch(on_mesh)
        try:
            found = self.loss.local_gradient(state, batch, at_use, scale)
        except NameError as error:
            check_not_of_shards(error, self.layout.axes)
            raise
        leaves, tree = jax.tree.flatten(found.values)
        values = [
            on_mesh.split(each.pack(x), each) for x, each in zip(leaves, partitions, strict=True)
        ]
        early = tuple(each.number > 1 for each in partitions)
        return found._replace(values=tree.unflatten(values), early=early)

    def specs(self, values: Any) -> Any:
        """The specs with which gradients enter ``shard_map``."""
        axes = self.layout.axes
        of_one = lambda each, _: only(each.spec(axes), axes)
        return map_partitions(of_one, self.layout.plan.params, values)
