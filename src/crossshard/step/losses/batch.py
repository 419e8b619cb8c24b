"""BatchLoss: one loss of all rows and its gradient, on global arrays whose work XLA splits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from crossshard import _jax
from crossshard.errors import LossError
from crossshard.gradients.status import GradientStatus
from crossshard.jaxprs.walk import equations_of
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.stage import Gradients, StageContext
from crossshard.shards.cut import map_partitions, only
from crossshard.step.arguments import check_not_of_shards
from crossshard.step.gather import AtUse, OnMesh
from crossshard.step.losses.loss import LossOver, StepLoss, Work
from crossshard.step.microbatches import LocalResult


def on_all_rows(at_use: AtUse, layout: StateLayout) -> AtUse:
    """How a loss of all rows gets the parameters of which each shard has its slices."""
    return at_use.over_batch(OnMesh(layout.mesh, layout.axes))


@dataclasses.dataclass(frozen=True)
class BatchLoss(StepLoss):
    """The loss of the batch, outside of ``shard_map``: of no shard, and reduced by XLA."""

    over: LossOver = LossOver.BATCH

    status = GradientStatus.REDUCED
    has_one_state = True
    is_interleaved = True
    gradient = "gradient of one loss over the batch, summed by XLA"

    def work(
        self,
        layout: StateLayout,
        state: TrainState,
        batch: Any,
        at_use: AtUse,
        scale: Callable[[TrainState], Any],
    ) -> Work:
        """To take the loss and its slices of the gradient, which are computed here.

        Raises:
          AxisError: the loss names a shard axis.
          LossError: XLA would compute it wrongly.
        """
        found, axes = self._of_batch(layout, state, batch, at_use, scale(state)), layout.axes
        whole, of_one = PartitionSpec(), lambda each, _: only(each.spec(axes), axes)
        given = found.loss, found.values, found.model_state, found.terms
        specs = whole, map_partitions(of_one, layout.arrays.params, found.values), whole, whole

        def of_shard(before: TrainState, given: Any, weight: Any) -> tuple[LocalResult, Any]:
            del weight
            loss, values, model_state, terms = given
            local = LocalResult(loss, values, None, model_state, None, terms, found.early)
            return local, before.params

        return Work(given, specs, of_shard, found.aux)

    def _of_batch(
        self, layout: StateLayout, state: TrainState, batch: Any, at_use: AtUse, scale: Any
    ) -> LocalResult:
        """The loss and its gradient, which is that of the batch and needs no reduction.

        Gradients of which each shard updates a slice come in these slices, so that XLA may sum into
        them what its devices computed.
        """
        partitions, at_use = layout.arrays.params, on_all_rows(at_use, layout)
        assert at_use.on_mesh is not None

        def compute(state: TrainState, batch: Any, scale: Any) -> LocalResult:
            return self.of_shard(state, batch, at_use, scale)._replace(early=())

        # Traced once: the call takes what was traced.
        inlined = jax.jit(compute, inline=True)
        try:
            if layout.number_of_shards > 1:
                rows = self.number_of_rows(batch) // self.accumulate_steps
                _check_convolutions(inlined.trace(state, batch, scale).jaxpr, rows)
            found = inlined(state, batch, scale)
        except NameError as error:
            check_not_of_shards(error, layout.axes)
            raise
        leaves, tree = jax.tree.flatten(found.values)
        values = [
            at_use.on_mesh.split(each.pack(x), each)
            for x, each in zip(leaves, partitions, strict=True)
        ]
        early = tuple(each.number > 1 for each in partitions)
        return found._replace(values=tree.unflatten(values), early=early)

    def in_context(self, context: StageContext) -> StageContext:
        """What nothing has to divide."""
        return dataclasses.replace(context, divisor=1, over_batch=True)

    def alone(self) -> StepLoss:
        """Itself: its microbatches are other losses, on any number of shards."""
        return self

    def check_state(self, state: TrainState) -> None:
        """There is one."""

    def sums(self, local: LocalResult) -> dict[str, Any]:
        """Nothing: all of it is of the batch."""
        return {}

    def settled_state(self, local: LocalResult, gradients: Gradients, number: int) -> Any:
        """The model state as the loss returned it."""
        return local.model_state

    def reduced_aux(
        self, local: LocalResult, gradients: Gradients, number: int, grouped: bool
    ) -> Any:
        """Nothing: it never enters ``shard_map``."""
        return None

    def aux_specs(self, each: Any, reduced: Any) -> Any:
        """Whole."""
        return PartitionSpec()


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
