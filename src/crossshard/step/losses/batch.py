"""BatchLoss: one loss of all rows and its gradient, on global arrays whose work XLA splits."""

import dataclasses
from typing import Any, final

import jax
from jax.sharding import PartitionSpec

from crossshard import _jax
from crossshard.errors import AxisError, LossError
from crossshard.gradients.status import GradientStatus
from crossshard.jaxprs.walk import equations_of
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.axes import Shards
from crossshard.shards.cut import map_partitions, spec_over
from crossshard.step.gather import AtUse, ByXLA
from crossshard.step.losses.loss import StepLoss, check_model_axes
from crossshard.step.losses.rows import compute_shard
from crossshard.step.microbatches import LocalResult


def on_all_rows(at_use: AtUse, layout: StateLayout) -> AtUse:
    """Return how a loss of all rows gets parameters, of which each shard has its slices.

    It runs as one shard with all rows, so that its key does not depend on the number of shards.
    """
    frozen = None if at_use.frozen is None else on_all_rows(at_use.frozen, layout)
    return dataclasses.replace(
        at_use,
        shards=Shards(1),
        sums_later=not at_use.params_sharded,
        frozen=frozen,
        by_xla=ByXLA(layout.mesh, layout.axes),
    )


@final
@dataclasses.dataclass(frozen=True)
class BatchLoss(StepLoss):
    """The loss of the whole batch, outside ``shard_map``; XLA reduces its gradient."""

    status = GradientStatus.REDUCED
    over_batch = True
    gradient_in_words = "gradient of one loss over the batch, summed by XLA"

    def enter(
        self, layout: StateLayout, state: TrainState, batch: Any, at_use: AtUse
    ) -> tuple[Any, Any, Any]:
        """Compute the loss and its gradient, which is that of the batch and needs no reduction.

        Gradients of which each shard updates a slice are returned in these slices, so that XLA may
        sum directly into them.

        Raises:
          AxisError: the loss names a shard axis.
          LossError: XLA would compute it wrongly.
        """
        axes, partitions, on_all = layout.axes, at_use.partitions, on_all_rows(at_use, layout)
        split = ByXLA(layout.mesh, axes).split

        def compute(state: TrainState, batch: Any) -> LocalResult:
            return compute_shard(self, state, batch, on_all)._replace(early=())

        # Traced once: the call reuses the trace.
        inlined = jax.jit(compute, inline=True)
        try:
            if layout.number_of_shards > 1:
                rows = self.number_of_rows(batch) // self.accumulate_steps
                _check_convolutions(inlined.trace(state, batch).jaxpr, rows)
            found = inlined(state, batch)
        except NameError as error:
            axis, where = _jax.unbound_axis(error, axes), _jax.source_of_error(error)
            if axis is None:
                check_model_axes(error, layout.mesh)
                raise
            raise AxisError(
                f"The loss names the shard axis {axis!r}{f' ({where})' if where else ''}, and with "
                f"loss_over='batch' it is given the rows of all shards: x.mean(0) is the mean over "
                f"the batch. Leave out pmean, all_gather, axis_index and the axis_name of a batch "
                f"norm; or write loss_over='shard'."
            ) from error
        leaves, tree = jax.tree.flatten(found.values)
        values = tree.unflatten(
            [split(each.pack(x), each) for x, each in zip(leaves, partitions, strict=True)]
        )
        whole, of_one = PartitionSpec(), lambda each, _: spec_over(each.spec(axes), axes)
        specs = whole, map_partitions(of_one, partitions, values), whole, whole
        return (found.loss, values, found.model_state, found.terms), specs, found.aux

    def local(
        self, before: TrainState, given: Any, at_use: AtUse, counts_in: Any = None
    ) -> tuple[LocalResult, Any]:
        """Return the loss, and a shard's slices of the gradient."""
        loss, values, model_state, terms = given
        early = tuple(each.number > 1 for each in at_use.partitions)
        # All of it is of the whole batch, so nothing else has to be summed.
        found = LocalResult(loss, values, None, model_state, None, terms, early, sums={})
        return found, before.params


def _splits_by_hand(equation: Any) -> bool:
    """Return whether XLA splits nothing in an equation over the shards."""
    found = equation.params
    return "manual_axes" in found and any(found["mesh"].shape[x] > 1 for x in found["manual_axes"])


def _check_convolutions(jaxpr: Any, rows: int) -> None:
    """Raise where a convolution is of the kind that XLA splits wrongly over devices.

    The gradient of a convolution's kernel for each row, as ``vmap`` of ``grad`` makes it, is one
    convolution with a group for each row; split by rows, it returns other numbers (seen with JAX
    0.10.2 on CPUs).
    """
    for equation in equations_of(jaxpr, but=_splits_by_hand):
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
