"""Pipeline: the stages from a local gradient to the update, in their order.

The Optax transformation, the stateful optimizer and the whole step all build this value and call
its ``update``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard.gradients.incoming import Incoming, check_shapes
from crossshard.gradients.nesting import refuse_nesting
from crossshard.gradients.reduction import Reduction
from crossshard.pipeline.aggregate import Mean, Sum
from crossshard.pipeline.optimize import apply_optimizer, takes_value
from crossshard.pipeline.plan import UpdateStrategy
from crossshard.pipeline.preprocess import as_local
from crossshard.pipeline.stage import Environment, Gradients, Stage
from crossshard.pipeline.state import CrossShardState
from crossshard.shards.axes import Shards, current_shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.placement import REPLICATED, Placement

_AGGREGATORS = {Reduction.MEAN: Mean(), Reduction.SUM: Sum()}
_UPDATES = {
    UpdateStrategy.WHOLE: ["update on every shard"],
    UpdateStrategy.PARTS: ["update in parts", "gather"],
    UpdateStrategy.GLOBAL: ["update on sharded global arrays", "gather"],
}


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Local gradient → preprocess → weigh → aggregate → optimizer → gather.

    Attributes:
      optimizer: the inner optimizer.
      reduction: MEAN or SUM, the reduction of the aggregate.
      groups: the groups that reduce independently; ``None`` for all shards.
      axis_name: the mesh axes of the shards; empty to infer them at trace time.
      incoming: the status of incoming gradients; ``None`` to read it from their types.
      preprocess: the stage on local gradients; ``None`` without one.
      weigh: the stage that applies the shard's weight; ``None`` if all weights are equal.
    """

    optimizer: optax.GradientTransformationExtraArgs
    reduction: Reduction
    groups: GroupAssignment | None = None
    axis_name: tuple[str, ...] = ()
    incoming: Incoming | None = None
    preprocess: Stage | None = None
    weigh: Stage | None = None

    @property
    def aggregate(self) -> Sum:
        """The stage that reduces gradients over the shards."""
        return _AGGREGATORS[self.reduction]

    def init(self, params: Any) -> CrossShardState:
        """One shard's state of every stage before the first step."""
        return CrossShardState(
            preprocess=() if self.preprocess is None else self.preprocess.init(params),
            aggregate=self.aggregate.init(params),
            inner_state=self.optimizer.init(params),
        )

    def update(
        self,
        gradients: Gradients,
        state: CrossShardState,
        environment: Environment,
        *,
        apply_updates: bool = False,
    ) -> tuple[Any, CrossShardState, Gradients]:
        """Full updates, or updated parameters; the next state; and the reduced gradients."""
        gradients, state = self.reduce(gradients, state, environment)
        result, state = self.optimize(gradients, state, environment, apply_updates=apply_updates)
        return result, state, gradients

    def reduce(
        self, gradients: Gradients, state: CrossShardState, environment: Environment
    ) -> tuple[Gradients, CrossShardState]:
        """The stages that run on each shard, up to the aggregate."""
        refuse_nesting()
        dtypes = _dtypes(gradients, environment.params)
        if self.preprocess is not None:
            gradients = as_local(gradients, environment)
            gradients, after = self.preprocess.update(gradients, state.preprocess, environment)
            state = state._replace(
                preprocess=_unless_weightless(gradients, after, state.preprocess)
            )
        if environment.params is not None:
            check_shapes(gradients.values, environment.params)
        if self.weigh is not None:
            gradients, _ = self.weigh.update(gradients, (), environment)
        gradients, after = self.aggregate.update(gradients, state.aggregate, environment)
        state = state._replace(aggregate=after)
        extra, values = jax.tree.map(_cast, (dict(gradients.extra), gradients.values), dtypes)
        return gradients.replace(values=values, extra=extra), state

    def optimize(
        self,
        gradients: Gradients,
        state: CrossShardState,
        environment: Environment,
        *,
        apply_updates: bool = False,
    ) -> tuple[Any, CrossShardState]:
        """The stages after the aggregate, which may run on each shard or on global arrays."""
        # Only optimizers that take the loss of a whole step get it; explicit arguments always pass.
        given, takes_loss = environment.extra_args, takes_value(self.optimizer)
        extra = {k: x for k, x in gradients.extra.items() if k in given or takes_loss}
        own, params = state.inner_state, environment.params
        if not self.over_all_shards:
            # Typed as they leave, or the branches of an optimizer would not have equal types.
            own, params = jax.tree.map(
                lambda x: environment.shards.as_varying(x) if jnp.shape(x) else x, (own, params)
            )
        result, after = apply_optimizer(
            self.optimizer,
            gradients.values,
            own,
            params,
            {**given, **extra},
            environment.arrays,
            apply_updates=apply_updates,
            skip=gradients.skip,
        )
        return result, state._replace(inner_state=after)

    def describe(self, strategy: UpdateStrategy | None = None) -> str:
        """The stages in the order in which they run, in one line."""
        over = "all shards" if self.groups is None else f"groups {self.groups}"
        axes = f" on {', '.join(self.axis_name)}" if self.axis_name else ""
        stages = [
            f"{self.incoming} gradient" if self.incoming else "local gradient",
            *(stage.describe() for stage in (self.preprocess, self.weigh) if stage is not None),
            f"{self.aggregate.describe()} over {over}{axes}",
            *(["update"] if strategy is None else _UPDATES[strategy]),
        ]
        return " → ".join(stages)

    # Queries of the callers before they call it.

    @property
    def placement_of_preprocess(self) -> Placement:
        """The placement of the preprocessor's state."""
        return REPLICATED if self.preprocess is None else self.preprocess.placement

    def placements(self, state: CrossShardState, inner: Any) -> CrossShardState:
        """The placement of each array of a state, given those of the inner optimizer."""
        return CrossShardState(
            preprocess=jax.tree.map(lambda _: self.placement_of_preprocess, state.preprocess),
            aggregate=jax.tree.map(lambda _: self.aggregate.placement, state.aggregate),
            inner_state=inner,
        )

    def shards(self, *, warn: bool = True) -> Shards:
        """The current shards; checks the groups against their number."""
        shards = current_shards(self.axis_name, warn=warn)
        if self.groups is not None:
            self.groups.check_covers(shards.number)
        return shards

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


def _unless_weightless(gradients: Gradients, after: Any, before: Any) -> Any:
    """A stage's next state; on a shard of weight 0 its old one, since gradients may be NaN."""
    weight = gradients.weight
    if weight is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(weight != 0, new, old), after, before)


def _dtypes(gradients: Gradients, params: Any) -> Any:
    """The dtypes of the reduced gradients, and of the values reduced with them."""
    values, tree = jax.tree.flatten(gradients.values)
    # compute_gradients divides in float32, and 16-bit parameters need 16-bit gradients.
    like = values if params is None else jax.tree.leaves(params)
    scaled = [status is Incoming.SCALED for status in gradients.status]
    of_values = [
        jnp.result_type(like[index] if is_scaled else leaf)
        for index, (leaf, is_scaled) in enumerate(zip(values, scaled, strict=True))
    ]
    return jax.tree.map(jnp.result_type, dict(gradients.extra)), tree.unflatten(of_values)


def _cast(leaf: Any, dtype: Any) -> Any:
    return leaf if dtype == jax.dtypes.float0 else leaf.astype(dtype)
