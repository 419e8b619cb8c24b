"""OverBatch: one loss of all rows and its gradient, on global arrays whose work XLA splits."""

import dataclasses
from typing import Any

import jax

from crossshard import _jax
from crossshard.errors import LossError
from crossshard.jaxprs.walk import equations_of
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.model_axes import only
from crossshard.shards.partition import map_partitions
from crossshard.step.arguments import check_not_of_shards
from crossshard.step.gather import AtUse, OnMesh
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
          LossError: XLA would compute it wrongly.
        """
        partitions = self.layout.plan.params
        on_mesh = OnMesh(self.layout.mesh, self.layout.axes)
        at_use = self.at_use.over_batch(on_mesh)

        def compute(state: TrainState, batch: Any, scale: Any) -> LocalResult:
            return self.loss.local_gradient(state, batch, at_use, scale)._replace(early=())

        # Traced once: the call takes what was traced.
        inlined = jax.jit(compute, inline=True)
        try:
            if self.layout.number_of_shards > 1:
                rows = self.loss.number_of_rows(batch) // self.loss.accumulate_steps
                _check_convolutions(inlined.trace(state, batch, scale).jaxpr, rows)
            found = inlined(state, batch, scale)
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


def _check_convolutions(jaxpr: Any, rows: int) -> None:
    """Raise where a convolution is of the kind that XLA splits wrongly over devices.

    The gradient of a convolution's kernel for each row, as ``vmap`` of ``grad`` makes it, is one
    convolution with a group for each row; split by rows, it returns other numbers (seen with JAX
    0.10.2 on CPUs).

    Raises:
      LossError: there is one.
    """
    for equation in equations_of(jaxpr):
        if equation.primitive.name != "conv_general_dilated":
            continue
        groups = equation.params["feature_group_count"]
        batch, features, *_ = equation.params["dimension_numbers"].lhs_spec
        shape = equation.invars[0].aval.shape
        is_of_rows = groups > 1 and groups % rows == 0 and shape[features] == groups
        if is_of_rows and shape[batch] % rows:
            raise LossError(
                f"The loss computes the gradient of a convolution's kernel for each row "
                f"({_jax.source_of(equation)}), and XLA returns other numbers for it where rows "
                f"are split over devices. If the loss is a mean over rows, leave loss_over='batch' "
                f"out; or take more than one row for each such gradient."
            )
