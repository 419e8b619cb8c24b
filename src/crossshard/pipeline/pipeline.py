"""Pipeline: the way of a gradient, every stage in its order.

All three ways in, an Optax transformation, a stateful optimizer and a whole step, build this value
and call its ``update``.
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
from crossshard.pipeline.optimize import apply_optimizer
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
      optimizer: the wrapped optimizer.
      reduction: MEAN or SUM, which is what the aggregate takes.
      groups: the groups that reduce for themselves; ``None`` for all shards together.
      axis_name: the axes over which the shards lie; empty to find them where the step runs.
      incoming: what gradients are when they arrive; ``None`` to read it from their types.
      preprocess: what is done to each shard's own gradient; ``None`` for nothing.
      weigh: what multiplies gradients by the shard's weight; ``None`` if all shards count alike.
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
        """What makes the gradients of the shards one."""
        return _AGGREGATORS[self.reduction]

    def init(self, params: Any) -> CrossShardState:
        """The state of every stage before the first step, as one shard has it."""
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
        """Whole updates, or updated parameters; the next state; and the reduced gradients."""
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
        beside, values = jax.tree.map(_cast, (dict(gradients.beside), gradients.values), dtypes)
        return gradients.replace(values=values, beside=beside), state

    def optimize(
        self,
        gradients: Gradients,
        state: CrossShardState,
        environment: Environment,
        *,
        apply_updates: bool = False,
    ) -> tuple[Any, CrossShardState]:
        """The stages after the aggregate, which may run on each shard or on global arrays."""
        own, params = state.inner_state, environment.params
        if not self.over_all_shards:
            # Typed as what they become, or the branches of an optimizer would not match.
            own, params = jax.tree.map(
                lambda x: environment.shards.as_varying(x) if jnp.shape(x) else x, (own, params)
            )
        result, after = apply_optimizer(
            self.optimizer,
            gradients.values,
            own,
            params,
            {**environment.extra_args, **gradients.beside},
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

    # What the ways in ask before they call it.

    @property
    def placement_of_preprocess(self) -> Placement:
        """How the state of the preprocessor lies."""
        return REPLICATED if self.preprocess is None else self.preprocess.placement

    def placements(self, state: CrossShardState, inner: Any) -> CrossShardState:
        """How each array of a state lies, given how those of the wrapped optimizer do."""
        return CrossShardState(
            preprocess=jax.tree.map(lambda _: self.placement_of_preprocess, state.preprocess),
            aggregate=jax.tree.map(lambda _: self.aggregate.placement, state.aggregate),
            inner_state=inner,
        )

    def shards(self, *, warn: bool = True) -> Shards:
        """The shards around this line, with the groups checked against their number."""
        shards = current_shards(self.axis_name, warn=warn)
        if self.groups is not None:
            self.groups.check_covers(shards.number)
        return shards

    @property
    def over_all_shards(self) -> bool:
        """Whether the aggregate is the same on every shard."""
        return self.groups is None or len(self.groups.groups) == 1

    def divisor(self, number_of_shards: int) -> int:
        """What MEAN divides by: the number of shards that reduce together. 1 under SUM."""
        return self.aggregate.divisor(number_of_shards, self.groups)

    def shards_per_group(self, number_of_shards: int) -> int:
        """How many shards have the same parameters."""
        return number_of_shards if self.groups is None else self.groups.size


def _unless_weightless(gradients: Gradients, after: Any, before: Any) -> Any:
    """A stage's next state; a shard of weight 0 may hold anything, and nothing is kept of it."""
    weight = gradients.weight
    if weight is None:
        return after
    return jax.tree.map(lambda new, old: jnp.where(weight != 0, new, old), after, before)


def _dtypes(gradients: Gradients, params: Any) -> Any:
    """The dtypes that the gradients, and what goes with them, have once they are reduced."""
    values, tree = jax.tree.flatten(gradients.values)
    # compute_gradients divides in 32 bits, and 16-bit parameters want gradients of 16 bits.
    like = values if params is None else jax.tree.leaves(params)
    scaled = [status is Incoming.SCALED for status in gradients.status]
    of_values = [
        jnp.result_type(like[place] if is_scaled else leaf)
        for place, (leaf, is_scaled) in enumerate(zip(values, scaled, strict=True))
    ]
    return jax.tree.map(jnp.result_type, dict(gradients.beside)), tree.unflatten(of_values)


def _cast(leaf: Any, dtype: Any) -> Any:
    return leaf if dtype == jax.dtypes.float0 else leaf.astype(dtype)
