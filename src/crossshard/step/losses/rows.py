"""RowsLoss: each shard's loss of its own rows of the batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from crossshard.collectives.sums import to_sum
from crossshard.model import model_state as model_states
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.stage import Gradients, StageContext
from crossshard.step.gather import AtUse
from crossshard.step.losses.loss import StepLoss, Work
from crossshard.step.microbatches import AuxReduction, LocalResult, aux_to_reduce, reduced_aux


class ShardsLoss(StepLoss):
    """A loss that each shard has of its rows, with its own gradient, ``aux`` and state."""

    def in_context(self, context: StageContext) -> StageContext:
        """The same."""
        return context

    def _work_of_rows(
        self,
        layout: StateLayout,
        batch: Any,
        at_use: AtUse,
        gradient: Callable[[TrainState, Any, AtUse, Any], LocalResult],
    ) -> Work:
        """What each shard has to do, given what computes its loss from its parameters and rows."""

        def of_shard(before: TrainState, batch: Any, weight: Any) -> tuple[LocalResult, Any]:
            params, use = before.params, at_use
            if use.waits:
                params, use = use.whole(params), dataclasses.replace(use, in_parts=False)
            like = use.types_of_gradients(params) if use.in_parts else params
            given = dataclasses.replace(before, params=params)
            return gradient(given, batch, use, weight), like

        return Work(batch, self.batch_axes.specs(batch, layout.axes), of_shard)

    def sums(self, local: LocalResult) -> dict[str, Any]:
        """What the aggregate must sum, by name, besides the gradients and the loss."""
        if local.sums is not None:
            return local.sums
        of_state = model_states.to_reduce(self.model_state, local.model_state, local.weight)
        of_aux = aux_to_reduce(self.aux_reduction, local.aux, local.weight)
        counted = lambda x: to_sum(x, local.weight)
        terms = {} if local.terms is None else {"terms": jax.tree.map(counted, local.terms)}
        return of_state | of_aux | terms

    def settled_state(self, local: LocalResult, gradients: Gradients, number: int) -> Any:
        """The model state, averaged if it is to be."""
        return model_states.settled(self.model_state, local.model_state, gradients, number)

    def reduced_aux(
        self, local: LocalResult, gradients: Gradients, number: int, grouped: bool
    ) -> Any:
        """One shard's ``aux`` as the metrics store it, given the reduced gradients."""
        if not self.has_aux:
            return None
        how = {"grouped": grouped, "stacked": local.sums is not None}
        return reduced_aux(self.aux_reduction, local.aux, gradients, number, **how)

    def aux_specs(self, each: Any, reduced: Any) -> Any:
        """The specs of ``aux``, given that of per-shard and that of reduced values."""
        is_per_shard = lambda reduction: reduction is AuxReduction.PER_SHARD
        return jax.tree.map(lambda x: each if is_per_shard(x) else reduced, self.aux_reduction)


@dataclasses.dataclass(frozen=True)
class RowsLoss(ShardsLoss):
    """The loss of each shard's rows, in one piece or in microbatches."""

    def work(
        self,
        layout: StateLayout,
        state: TrainState,
        batch: Any,
        at_use: AtUse,
        scale: Callable[[TrainState], Any],
    ) -> Work:
        """To compute the loss of its rows, and its gradient."""

        def gradient(before: TrainState, batch: Any, at_use: AtUse, weight: Any) -> LocalResult:
            return self.of_shard(before, batch, at_use, scale(before), weight)

        return self._work_of_rows(layout, batch, at_use, gradient)

    def alone(self) -> StepLoss:
        """The mean of the microbatches is that of all rows."""
        return dataclasses.replace(self, accumulate_steps=1)

    def check_state(self, state: TrainState) -> None:
        """Each shard may have its own."""
