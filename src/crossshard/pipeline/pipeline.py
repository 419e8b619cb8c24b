"""Pipeline: the stages from a local gradient to the update, in their order.

The Optax transformation, the stateful optimizer and the whole step all build this value and run
its stages.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard import _check
from crossshard.collectives.sums import sum_over_shards
from crossshard.errors import ArgumentError
from crossshard.gradients.nesting import refuse_nesting
from crossshard.gradients.reduction import Reduction
from crossshard.gradients.status import GradientStatus
from crossshard.pipeline.aggregators.aggregator import Aggregator
from crossshard.pipeline.aggregators.plain import Plain
from crossshard.pipeline.own import check_returned
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, as_local
from crossshard.pipeline.stages.accumulate import Accumulate
from crossshard.pipeline.stages.aggregate import Aggregate
from crossshard.pipeline.stages.loss_scale import DynamicLossScale
from crossshard.pipeline.stages.metrics import LocalNorms, Metrics, need_local
from crossshard.pipeline.stages.nonfinite import (
    REPORTED,
    Nonfinite,
    ReportNonfinite,
    as_counted,
    check_fits,
    if_not_finite,
    is_sound,
    of_no_shard,
    with_finite,
)
from crossshard.pipeline.stages.outer import Outer
from crossshard.pipeline.stages.weigh import Weigh
from crossshard.pipeline.state import CrossShardState
from crossshard.pipeline.update.averages import Decay
from crossshard.pipeline.update.optimize import Optimize, Updated
from crossshard.shards.axes import Shards, current_shards
from crossshard.shards.groups import GroupAssignment, over_all_shards, size_of_group
from crossshard.shards.placement import PER_SHARD, REPLICATED

_TO_REDUCTION = (Phase.ARRIVAL, Phase.LOCAL, Phase.REDUCTION)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """From local gradients to updated parameters.

    Attributes:
      inner: the inner optimizer, as the user passed it.
      reduction: MEAN or SUM, the reduction of the aggregate.
      groups: the groups that reduce independently; ``None`` for all shards.
      axis_name: the mesh axes of the shards; empty to infer them at trace time.
      incoming: the status of incoming gradients; ``None`` to read it from their types.
      accumulate: the stage that sums the gradients of several calls; ``None`` to update at each.
      preprocess: the stage on local gradients; ``None`` without one.
      reduce_dtype: the dtype in which gradients are sent; ``None`` for their own, or float32.
      aggregator: what sums the gradients, if not XLA.
      loss_scale: the stage that skips steps that overflow; ``None`` without one.
      nonfinite: the stage that keeps out what is not finite; ``None`` without one.
      master_dtype: the dtype of master weights; ``None`` without them.
      ema: the decay of the moving average of the parameters, or a schedule of it; ``None``
        without one.
      metrics: the names of the metrics of each update.
      outer: the stage that synchronises workers, which are the groups; ``None`` without one.
    """

    inner: optax.GradientTransformationExtraArgs
    reduction: Reduction
    groups: GroupAssignment | None = None
    axis_name: tuple[str, ...] = ()
    incoming: GradientStatus | None = None
    accumulate: Accumulate | None = None
    preprocess: Stage | None = None
    reduce_dtype: Any = None
    aggregator: Aggregator | None = None
    loss_scale: DynamicLossScale | None = None
    nonfinite: Nonfinite | None = None
    master_dtype: Any = None
    ema: Decay | None = None
    metrics: tuple[str, ...] = ()
    outer: Outer | None = None

    def __post_init__(self) -> None:
        if self.aggregator is not None and self.reduce_dtype is not None:
            raise ArgumentError(
                f"reduce_dtype={str(self.reduce_dtype)!r} is for the sum that XLA computes, and "
                f"gradients are already to be summed {self.aggregator.describe()}. Leave one of "
                f"them out."
            )
        if self.nonfinite is not None:
            check_fits(self.nonfinite, self.reduction, has_loss_scale=self.loss_scale is not None)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the order in which they run, which is also that of their phases."""
        of_metrics = REPLICATED if self.over_all_shards else PER_SHARD
        every = (
            self.accumulate,
            self.nonfinite and ReportNonfinite(self.excludes_shards),
            self.preprocess,
            LocalNorms() if need_local(self.metrics) else None,
            Weigh(),
            Aggregate(self.reduction, self.groups, self.axis_name, self.sums_by),
            self.loss_scale,
            self.nonfinite,
            self.optimize,
            Metrics(self.metrics, self.optimizer, of_metrics) if self.metrics else None,
            self.outer,
        )
        return tuple(stage for stage in every if stage is not None)

    @property
    def sums_by(self) -> Aggregator:
        """What sums the gradients."""
        return self.aggregator or Plain(self.reduce_dtype)

    @property
    def _stateful(self) -> dict[str, Stage]:
        """The stages with a state, by its field."""
        return {stage.state_field: stage for stage in self.stages if stage.state_field}

    @functools.cached_property
    def optimize(self) -> Optimize:
        """The stage that updates."""
        return Optimize(self.inner, self.master_dtype, self.ema)

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer, with a moving average and master weights if asked for."""
        return self.optimize.optimizer

    def init(self, params: Any) -> CrossShardState:
        """One shard's state of every stage before the first step."""
        made = {name: stage.init(params) for name, stage in self._stateful.items()}
        for name, state in made.items():
            # JAX keeps numbers from one step to the next, and nothing else.
            _check.arrays(f"The state of {name}", state, or_types=True)
        return CrossShardState(**made)

    def may_differ(self, path: Any) -> bool:
        """Whether the state at a path may differ between shards with equal parameters."""
        stage = self._stateful.get(path[0].name)
        return stage is not None and stage.placement.per_shard

    def placements(self, state: CrossShardState, inner: Any = ()) -> CrossShardState:
        """The placement of each array of a state, given those of the inner optimizer."""
        found = {name: s.placements(getattr(state, name)) for name, s in self._stateful.items()}
        return CrossShardState(**found)._replace(inner_state=inner)

    def describe(
        self,
        steps: Sequence[str] = ("update",),
        *,
        weighted: bool = False,
        in_parts: bool = False,
        of_loss: str = "",
        microbatches: int = 1,
    ) -> str:
        """The stages in the order in which they run, in one line.

        Args:
          steps: the update and what follows it.
          weighted: whether shards have weights.
          in_parts: whether parameters rest in parts.
          of_loss: the gradient in words, if it is of a loss of which no shard has its own.
          microbatches: the number of microbatches in one program.
        """
        update, *gather = steps
        texts = [of_loss or f"{self.incoming or 'local'} gradient"]
        if in_parts:
            texts, gather = [*gather, *texts], []
        texts += [f"accumulate {microbatches} microbatches"] * (microbatches > 1)
        for stage in self.stages:
            if isinstance(stage, Weigh) and not (weighted or self.excludes_shards):
                continue
            if isinstance(stage, Aggregate) and of_loss:
                continue
            if stage is self.optimize:
                texts += [self.optimize.describe(update), *gather]
            else:
                texts.append(stage.describe())
        # Two stages that skip are one to the reader.
        return " → ".join(dict.fromkeys(filter(None, texts)))

    # Running it.

    def update(
        self, gradients: Gradients, state: CrossShardState, context: StageContext
    ) -> tuple[Gradients, CrossShardState]:
        """All stages: the reduced gradients with the update, and the next state.

        The gradients of a call that only accumulates have no values, and their step is skipped.
        """
        if self.accumulate is None:
            return self._update_once(gradients, state, context)
        gradients, after = self.run((Phase.CALL,), gradients, state, context)
        sums = after.accumulate

        def last(state: CrossShardState) -> Any:
            reduced, after = self._update_once(gradients, state, context)
            skip = jnp.bool_(False) if reduced.skip is None else reduced.skip
            empty = jax.tree.map(jnp.zeros_like, sums)
            # All shards have the same, but who carries a state per shard has no type that says so.
            shards = context.shards
            typed = lambda new, old: shards.as_varying(new) if shards.is_varying(old) else new
            found = jax.tree.map(typed, after.nonfinite, state.nonfinite)
            after = after._replace(accumulate=empty, nonfinite=found)
            assert reduced.updated is not None
            return self._as_varying(reduced.updated.result, after, skip, context)

        def wait(state: CrossShardState) -> Any:
            like = jax.eval_shape(last, state)[0]
            result = context.params if context.apply_updates else jax.tree.map(jnp.zeros_like, like)
            state = state._replace(accumulate=sums)
            return self._as_varying(result, state, jnp.bool_(True), context)

        result, state, skip = lax.cond(self.accumulate.is_last(sums), last, wait, state)
        return gradients.replace(values=None, skip=skip, updated=Updated(result)), state

    def _as_varying(
        self, result: Any, state: CrossShardState, skip: Any, context: StageContext
    ) -> tuple[Any, CrossShardState, Any]:
        """The results of a branch; what may differ between groups as varying in both branches."""
        if self.over_all_shards:
            return result, state, skip
        parts = result, state.inner_state, state.metrics, skip
        result, inner_state, metrics, skip = jax.tree.map(context.shards.as_varying, parts)
        return result, state._replace(inner_state=inner_state, metrics=metrics), skip

    def _update_once(
        self, gradients: Gradients, before: CrossShardState, context: StageContext
    ) -> tuple[Gradients, CrossShardState]:
        gradients, state = self.reduce(gradients, before, context)
        return self.finish(gradients, state, before, context)

    def reduce(
        self,
        gradients: Gradients,
        before: CrossShardState,
        context: StageContext,
        others: Callable[[jax.Array | None], dict[str, Any]] = lambda _: {},
        recounted: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> tuple[Gradients, CrossShardState]:
        """The stages up to the reduction.

        Args:
          gradients: those of each shard.
          before: the state before these stages.
          context: the context.
          others: what the aggregate is to sum besides, by name, given the weight of the shard.
          recounted: computes the gradients and the loss of this shard again, given its weight, if
            they depend on which shards count; ``None`` if they do not.
        """
        if recounted is not None and self.excludes_shards and self.preprocess is not None:
            raise ArgumentError(
                "The loss returns a Mean, whose gradients are computed again without a shard that "
                "nonfinite='quarantine' leaves out, and preprocess= changes them in between. Put "
                "it before the optimizer, optax.chain(preprocess, optimizer), or write "
                "nonfinite='skip'."
            )

        def examined(gradients: Gradients) -> Gradients:
            return self.run((Phase.ARRIVAL,), gradients, before, context)[0]

        def weighed(gradients: Gradients) -> tuple[Gradients, CrossShardState]:
            sums = {**others(gradients.weight), **gradients.sums}
            return self.run((Phase.LOCAL,), gradients.replace(sums=sums), before, context)

        def summed(gradients: Gradients, state: CrossShardState) -> Any:
            reduced, state = self.run((Phase.REDUCTION,), gradients, state, context)
            if self.nonfinite is not None:
                return with_finite(reduced, context, is_sound(gradients)), state
            return reduced if self.loss_scale is None else with_finite(reduced, context), state

        if self.nonfinite is None or self.preprocess is not None:
            # With preprocess a gradient may be finite that was not.
            return summed(*weighed(examined(gradients)))

        # Only a reduced gradient that is not finite says that a shard's own may not be.
        gradients = as_local(gradients, context, ReportNonfinite.needs_local)
        if self.excludes_shards:
            gradients = gradients.replace(weight=as_counted(gradients.weight))
        reduced, state = summed(*weighed(gradients))
        with jax.named_scope(self.nonfinite.scope):
            none = jnp.zeros(context.shards.number, jnp.float32)
            none = none if self.over_all_shards else context.shards.as_varying(none)
            reduced = reduced.replace(sums={**reduced.sums, REPORTED: none})

            def without_bad(_: Any, own: Any) -> tuple[tuple[Gradients, Any], Any]:
                left = examined(gradients.replace(values=own))
                if recounted is not None:
                    values, loss = recounted(left.weight)
                    left = left.replace(values=values, extra={**left.extra, "value": loss})
                rest, again = weighed(left)
                kept = lambda new, old: new if new.dtype == old.dtype else old
                found, again = summed(rest, again)
                return (found, again.aggregate), jax.tree.map(kept, rest.values, own)

            def named(done: tuple[Gradients, Any], own: Any) -> tuple[tuple[Gradients, Any], Any]:
                reduced, after = done
                report = examined(gradients.replace(values=own)).sums[REPORTED]
                found = sum_over_shards(report, context.shards.within(context.groups))
                found = of_no_shard(found) if context.over_batch else found
                return (reduced.replace(sums={**reduced.sums, REPORTED: found}), after), own

            function = without_bad if self.excludes_shards else named
            # What an aggregator keeps must not be of gradients that are not finite, either.
            done = reduced, state.aggregate
            reduced, after = if_not_finite(done, gradients.values, function, context)
            return reduced, state._replace(aggregate=after)

    def finish(
        self,
        gradients: Gradients,
        state: CrossShardState,
        before: CrossShardState,
        context: StageContext,
    ) -> tuple[Gradients, CrossShardState]:
        """The stages after the reduction; ``before`` is the state before those up to it.

        A skipped step leaves the states of these as they were.
        """
        gradients, state = self.run((Phase.UPDATE,), gradients, state, context)
        if gradients.skip is not None:
            names = [name for name, s in self._stateful.items() if s.phase in _TO_REDUCTION]
            new, old = ({name: getattr(s, name) for name in names} for s in (state, before))
            keep = lambda new, old: jnp.where(gradients.skip, old, new)
            state = state._replace(**jax.tree.map(keep, new, old))
        return gradients, state

    def run(
        self,
        phases: Collection[Phase],
        gradients: Gradients,
        state: CrossShardState,
        context: StageContext,
    ) -> tuple[Gradients, CrossShardState]:
        """The stages of some phases."""
        refuse_nesting()
        for stage in self.stages:
            if stage.phase not in phases:
                continue
            if stage.phase < Phase.REDUCTION and stage.needs_local:
                gradients = as_local(gradients, context, stage.needs_local)
            before = getattr(state, stage.state_field) if stage.state_field else ()
            with jax.named_scope(stage.scope) if stage.scope else contextlib.nullcontext():
                returned = stage.update(gradients, before, context)
            if stage is self.preprocess:
                name = f"{type(stage).__name__}.update"
                returned = check_returned(returned, gradients, before, name)
            gradients, after = returned
            if stage.phase in (Phase.ARRIVAL, Phase.LOCAL):
                after = _unless_weightless(gradients, after, before)
            if stage.state_field:
                state = state._replace(**{stage.state_field: after})
        return gradients, state

    # Queries of the callers before they call it.

    @property
    def needs_own_gradient(self) -> bool:
        """Whether a stage before the reduction needs the whole gradient of each shard."""
        reads = self.preprocess, self.nonfinite, self.aggregator
        return any(stage is not None for stage in reads) or need_local(self.metrics)

    @property
    def excludes_shards(self) -> bool:
        """Whether a shard whose gradient is not finite does not count."""
        return self.nonfinite is not None and self.nonfinite.excludes_shards

    def shards(self, *, warn: bool = True) -> Shards:
        """The current shards; checks the groups against their number."""
        shards = current_shards(self.axis_name, warn=warn)
        if self.groups is not None:
            self.groups.check_covers(shards.number)
        return shards

    @property
    def over_all_shards(self) -> bool:
        """Whether the aggregate is the same on every shard."""
        return over_all_shards(self.groups)

    def skips_everywhere(self, skip: jax.Array | None) -> jax.Array | None:
        """Whether all groups skip the update: a global step is one for all of them."""
        if skip is None or self.over_all_shards:
            return skip
        return StageContext(self.shards(warn=False), self.groups).on_all_shards(skip)

    def divisor(self, number_of_shards: int) -> int:
        """The divisor of MEAN: the number of shards that reduce together; 1 under SUM."""
        if self.reduction is Reduction.SUM:
            return 1
        return size_of_group(self.groups, number_of_shards)


def _unless_weightless(gradients: Gradients, after: Any, before: Any) -> Any:
    """A stage's next state; on a shard of weight 0 its old one, since gradients may be NaN."""
    weight = gradients.weight
    if weight is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(weight != 0, new, old), after, before)
