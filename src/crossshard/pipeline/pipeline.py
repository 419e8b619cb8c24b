"""Pipeline: the stages from a local gradient to the update, in their order.

The Optax transformation, the stateful optimizer and the whole step all build this value and call
its ``update``.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard.gradients.incoming import Incoming, check_shapes
from crossshard.gradients.nesting import refuse_nesting
from crossshard.gradients.reduction import Reduction
from crossshard.pipeline.accumulate import Accumulate
from crossshard.pipeline.aggregate import Mean, Sum
from crossshard.pipeline.loss_scale import DynamicLossScale
from crossshard.pipeline.masters import with_masters
from crossshard.pipeline.metrics import Metrics
from crossshard.pipeline.moving_average import Decay, describe_decay, with_moving_average
from crossshard.pipeline.nonfinite import Nonfinite, check_fits
from crossshard.pipeline.optimize import apply_optimizer, takes_value
from crossshard.pipeline.plan import UpdateStrategy
from crossshard.pipeline.preprocess import as_local
from crossshard.pipeline.stage import Environment, Gradients, Stage
from crossshard.pipeline.state import CrossShardState
from crossshard.pipeline.weigh import Weigh
from crossshard.shards.axes import Shards, current_shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.placement import PER_SHARD, REPLICATED

_AGGREGATORS = {Reduction.MEAN: Mean, Reduction.SUM: Sum}
_UPDATES = {
    UpdateStrategy.WHOLE: ["update on every shard"],
    UpdateStrategy.PARTS: ["update in parts", "gather"],
    UpdateStrategy.GLOBAL: ["update on sharded global arrays", "gather"],
}


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """From local gradients to updated parameters.

    Accumulate → quarantine → preprocess → weigh → aggregate → guard → optimizer → gather.

    Attributes:
      inner: the inner optimizer, as the user passed it.
      reduction: MEAN or SUM, the reduction of the aggregate.
      groups: the groups that reduce independently; ``None`` for all shards.
      axis_name: the mesh axes of the shards; empty to infer them at trace time.
      incoming: the status of incoming gradients; ``None`` to read it from their types.
      accumulate: the stage that sums the gradients of several calls; ``None`` to update at each.
      preprocess: the stage on local gradients; ``None`` without one.
      reduce_dtype: the dtype in which gradients are sent; ``None`` for their own, or float32.
      loss_scale: the stage that skips steps that overflow; ``None`` without one.
      nonfinite: the stage that keeps out what is not finite; ``None`` without one.
      master_dtype: the dtype of master weights; ``None`` without them.
      ema: the decay of the moving average of the parameters, or a schedule of it; ``None``
        without one.
      metrics: the metrics of each update.
    """

    inner: optax.GradientTransformationExtraArgs
    reduction: Reduction
    groups: GroupAssignment | None = None
    axis_name: tuple[str, ...] = ()
    incoming: Incoming | None = None
    accumulate: Accumulate | None = None
    preprocess: Stage | None = None
    reduce_dtype: Any = None
    loss_scale: DynamicLossScale | None = None
    nonfinite: Nonfinite | None = None
    master_dtype: Any = None
    ema: Decay | None = None
    metrics: Metrics = dataclasses.field(default_factory=Metrics)

    def __post_init__(self) -> None:
        if self.nonfinite is not None:
            check_fits(self.nonfinite, self.reduction, has_loss_scale=self.loss_scale is not None)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer, with a moving average and master weights if asked for."""
        optimizer = self.inner
        if self.ema is not None:
            optimizer = with_moving_average(optimizer, self.ema)
        if self.master_dtype is not None:
            optimizer = with_masters(optimizer, self.master_dtype)
        return optimizer

    @property
    def aggregate(self) -> Sum:
        """The stage that reduces gradients over the shards."""
        return _AGGREGATORS[self.reduction](self.reduce_dtype)

    def init(self, params: Any) -> CrossShardState:
        """One shard's state of every stage before the first step."""
        inner_state = self.optimizer.init(params)
        own = lambda stage: () if stage is None else stage.init(params)
        return CrossShardState(
            accumulate=own(self.accumulate),
            preprocess=own(self.preprocess),
            aggregate=self.aggregate.init(params),
            loss_scale=own(self.loss_scale),
            nonfinite=own(self.nonfinite),
            metrics=self.metrics.init(self.optimizer, inner_state),
            inner_state=inner_state,
        )

    def update(
        self,
        gradients: Gradients,
        state: CrossShardState,
        environment: Environment,
        *,
        apply_updates: bool = False,
    ) -> tuple[Any, CrossShardState, Gradients]:
        """Full updates, or updated parameters; the next state; and the reduced gradients.

        The gradients of a call that only accumulates have no values, and their step is skipped.
        """
        if self.accumulate is None:
            gradients, after = self.reduce(gradients, state, environment)
            return self.optimize(
                gradients, after, environment, before=state, apply_updates=apply_updates
            )
        gradients = as_local(gradients, environment, "accumulate_steps adds up")
        with jax.named_scope("accumulate"):
            gradients, sums = self.accumulate.update(gradients, state.accumulate, environment)

        def last(state: CrossShardState) -> Any:
            once = dataclasses.replace(self, accumulate=None)
            result, after, reduced = once.update(
                gradients, state, environment, apply_updates=apply_updates
            )
            skip = jnp.bool_(False) if reduced.skip is None else reduced.skip
            empty = jax.tree.map(jnp.zeros_like, sums)
            # All shards have the same, but who carries a state per shard has no type that says so.
            shards = environment.shards
            typed = lambda new, old: shards.as_varying(new) if shards.is_varying(old) else new
            found = jax.tree.map(typed, after.nonfinite, state.nonfinite)
            after = after._replace(accumulate=empty, nonfinite=found)
            return self._as_varying(result, after, skip, environment)

        def wait(state: CrossShardState) -> Any:
            like = jax.eval_shape(last, state)[0]
            result = environment.params if apply_updates else jax.tree.map(_zeros_like, like)
            state = state._replace(accumulate=sums)
            return self._as_varying(result, state, jnp.bool_(True), environment)

        # All shards agree on the count, so that they meet in the collectives of `last`.
        result, state, skip = lax.cond(self.accumulate.is_last(sums), last, wait, state)
        return result, state, gradients.replace(values=None, skip=skip)

    def _as_varying(
        self, result: Any, state: CrossShardState, skip: Any, environment: Environment
    ) -> tuple[Any, CrossShardState, Any]:
        """The results of a branch; what may differ between groups as varying in both branches."""
        if self.over_all_shards:
            return result, state, skip
        parts = result, state.inner_state, state.metrics, skip
        parts = jax.tree.map(environment.shards.as_varying, parts)
        result, inner_state, metrics, skip = parts
        return result, state._replace(inner_state=inner_state, metrics=metrics), skip

    def reduce(
        self, gradients: Gradients, state: CrossShardState, environment: Environment
    ) -> tuple[Gradients, CrossShardState]:
        """The stages that run on each shard, up to the aggregate."""
        refuse_nesting()
        dtypes = self._dtypes(gradients, environment.params)
        gradients = self._as_local(gradients, environment)
        if self.nonfinite is not None:
            with jax.named_scope("nonfinite"):
                gradients = self.nonfinite.report(gradients, environment)
        if self.preprocess is not None:
            with jax.named_scope("preprocess"):
                gradients, after = self.preprocess.update(gradients, state.preprocess, environment)
            state = state._replace(
                preprocess=_unless_weightless(gradients, after, state.preprocess)
            )
        if environment.params is not None:
            check_shapes(gradients.values, environment.params)
        gradients = gradients.replace(sums={**gradients.sums, **self.metrics.sums(gradients)})
        if gradients.weight is not None:
            with jax.named_scope("weigh"):
                gradients, _ = Weigh().update(gradients, (), environment)
        gradients = _without_unread(gradients, environment.unread)
        with jax.named_scope("reduce"):
            gradients, after = self.aggregate.update(gradients, state.aggregate, environment)
        state = state._replace(aggregate=after)
        extra, values = jax.tree.map(_cast, (dict(gradients.extra), gradients.values), dtypes)
        return gradients.replace(values=values, extra=extra), state

    def _as_local(self, gradients: Gradients, environment: Environment) -> Gradients:
        if self.preprocess is not None:
            return as_local(gradients, environment, "preprocess applies to")
        if gradients.weight is not None:
            return as_local(gradients, environment, "weight multiplies")
        if self.nonfinite is not None:
            return as_local(gradients, environment, "nonfinite checks")
        if self.metrics.needs_local:
            return as_local(gradients, environment, f"metrics={self.metrics.names} measures")
        return gradients

    def optimize(
        self,
        gradients: Gradients,
        state: CrossShardState,
        environment: Environment,
        *,
        before: CrossShardState,
        apply_updates: bool = False,
    ) -> tuple[Any, CrossShardState, Gradients]:
        """The stages after the aggregate, which may run on each shard or on global arrays.

        ``before`` is the state to which a skipped step returns.
        """
        if self.loss_scale is not None:
            with jax.named_scope("loss_scale"):
                gradients, after = self.loss_scale.update(gradients, state.loss_scale, environment)
            state = state._replace(loss_scale=after)
        if self.nonfinite is not None:
            with jax.named_scope("nonfinite"):
                gradients, found = self.nonfinite.update(gradients, state.nonfinite, environment)
            state = state._replace(nonfinite=found)
        # Only optimizers that take the loss of a whole step get it; explicit arguments always pass.
        given, takes_loss = environment.extra_args, takes_value(self.optimizer)
        extra = {k: x for k, x in gradients.extra.items() if k in given or takes_loss}
        own, params = state.inner_state, environment.params
        if not self.over_all_shards:
            # Typed as they leave, or the branches of an optimizer would not have equal types.
            own, params = jax.tree.map(
                lambda x: environment.shards.as_varying(x) if jnp.shape(x) else x, (own, params)
            )
        updated = apply_optimizer(
            self.optimizer,
            gradients.values,
            own,
            params,
            {**given, **extra},
            environment.arrays,
            apply_updates=apply_updates,
            skip=gradients.skip,
            by_loop=environment.skips_by_loop,
        )
        state = state._replace(inner_state=updated.state)
        if gradients.skip is not None:
            state = _unless_skipped(gradients.skip, state, before)
        if self.metrics:
            with jax.named_scope("metrics"):
                measured = self.metrics.measure(
                    gradients, environment, updated, self.optimizer, before.inner_state
                )
            state = state._replace(metrics=measured)
        return updated.result, state, gradients

    def describe(self, strategy: UpdateStrategy | None = None, *, weighted: bool = False) -> str:
        """The stages in the order in which they run, in one line."""
        over = "all shards" if self.groups is None else f"groups {self.groups}"
        axes = f" on {', '.join(self.axis_name)}" if self.axis_name else ""
        wire = f" in {self.reduce_dtype}" if self.reduce_dtype is not None else ""
        weigh = Weigh() if weighted or self.excludes_shards else None
        guard = self.loss_scale or self.nonfinite
        update, *gather = ["update"] if strategy is None else _UPDATES[strategy]
        masters = [] if self.master_dtype is None else [f"{self.master_dtype} masters"]
        average = [] if self.ema is None else [f"moving average {describe_decay(self.ema)}"]
        if masters or average:
            update += f" ({', '.join([*masters, *average])})"
        local = (self.preprocess, weigh)
        stages = [
            f"{self.incoming} gradient" if self.incoming else "local gradient",
            *([] if self.accumulate is None else [self.accumulate.describe()]),
            *(["quarantine"] if self.excludes_shards else []),
            *(stage.describe() for stage in local if stage is not None),
            f"{self.aggregate.describe()} over {over}{axes}{wire}",
            *([] if guard is None else [guard.describe()]),
            update,
            *gather,
        ]
        return " → ".join(stages)

    # Queries of the callers before they call it.

    @property
    def excludes_shards(self) -> bool:
        """Whether a shard whose gradient is not finite does not count."""
        return self.nonfinite is not None and self.nonfinite.excludes_shards

    def placements(self, state: CrossShardState, inner: Any = ()) -> CrossShardState:
        """The placement of each array of a state, given those of the inner optimizer."""
        own = lambda stage, state: () if stage is None else stage.placements(state)
        of_metrics = REPLICATED if self.over_all_shards else PER_SHARD
        return CrossShardState(
            accumulate=own(self.accumulate, state.accumulate),
            preprocess=own(self.preprocess, state.preprocess),
            aggregate=own(self.aggregate, state.aggregate),
            loss_scale=own(self.loss_scale, state.loss_scale),
            nonfinite=own(self.nonfinite, state.nonfinite),
            metrics=jax.tree.map(lambda _: of_metrics, state.metrics),
            inner_state=inner,
        )

    def shards(self, *, warn: bool = True) -> Shards:
        """The current shards; checks the groups against their number."""
        shards = current_shards(self.axis_name, warn=warn)
        if self.groups is not None:
            self.groups.check_covers(shards.number)
        return shards

    def _dtypes(self, gradients: Gradients, params: Any) -> Any:
        """The dtypes of the reduced gradients, and of the values reduced with them."""
        values, tree = jax.tree.flatten(gradients.values)
        # compute_gradients divides in float32, and 16-bit parameters need 16-bit gradients.
        like = values if params is None else jax.tree.leaves(params)
        of_values = []
        # The parameters of optax.lookahead have more leaves than the gradients.
        for leaf, param, status in zip(values, like, gradients.status, strict=False):
            is_widened = status is Incoming.SCALED or gradients.widened
            dtype = jnp.result_type(param if is_widened else leaf)
            if self.master_dtype is not None and status is not None:
                dtype = jnp.promote_types(dtype, self.master_dtype)
            of_values.append(dtype)
        return jax.tree.map(jnp.result_type, dict(gradients.extra)), tree.unflatten(of_values)

    @property
    def over_all_shards(self) -> bool:
        """Whether the aggregate is the same on every shard."""
        return self.groups is None or len(self.groups.groups) == 1

    def divisor(self, number_of_shards: int) -> int:
        """The divisor of MEAN: the number of shards that reduce together; 1 under SUM."""
        return self.aggregate.divisor(number_of_shards, self.groups)

    def shards_per_group(self, number_of_shards: int) -> int:
        """The number of shards that have the same parameters."""
        return number_of_shards if self.groups is None else self.groups.size


def _without_unread(gradients: Gradients, unread: Sequence[bool]) -> Gradients:
    """The gradients, of which those that nothing reads count as reduced: they are all zero."""
    if not any(unread):
        return gradients
    status = tuple(
        Incoming.REDUCED if is_unread else each
        for each, is_unread in zip(gradients.status, unread, strict=True)
    )
    return gradients.replace(status=status)


def _zeros_like(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype)


def _unless_skipped(
    skip: jax.Array, after: CrossShardState, before: CrossShardState
) -> CrossShardState:
    """The next state of the stages before the optimizer; their old one if the step is skipped."""
    kept = jax.tree.map(
        lambda new, old: jnp.where(skip, old, new),
        (after.preprocess, after.aggregate),
        (before.preprocess, before.aggregate),
    )
    return after._replace(preprocess=kept[0], aggregate=kept[1])


def _unless_weightless(gradients: Gradients, after: Any, before: Any) -> Any:
    """A stage's next state; on a shard of weight 0 its old one, since gradients may be NaN."""
    weight = gradients.weight
    if weight is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(weight != 0, new, old), after, before)


def _cast(leaf: Any, dtype: Any) -> Any:
    return leaf if dtype == jax.dtypes.float0 else leaf.astype(dtype)
