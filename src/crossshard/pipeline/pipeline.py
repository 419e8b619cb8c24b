"""Pipeline: the way of a gradient, every stage in its order.

All three ways in, an Optax transformation, a stateful optimizer and a whole step, build this value
and call its ``update``.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.incoming import Incoming, leaf_name, read_incoming
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

_AGGREGATORS = {Reduction.MEAN: Mean(), Reduction.SUM: Sum()}
_UPDATES = {
    UpdateStrategy.WHOLE: ["update on every shard"],
    UpdateStrategy.PARTS: ["update in parts", "gather"],
    UpdateStrategy.GLOBAL: ["update on sharded global arrays", "gather"],
}


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Local gradient → preprocess → weigh → aggregate → guard → optimizer → gather.

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
        to_params: bool = False,
    ) -> tuple[Any, CrossShardState, Gradients]:
        """Whole updates, or updated parameters; the next state; and the reduced gradients."""
        gradients, state = self.reduce(gradients, state, environment)
        result, state = self.optimize(gradients, state, environment, to_params=to_params)
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
            state = state._replace(preprocess=after)
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
        to_params: bool = False,
    ) -> tuple[Any, CrossShardState]:
        """The stages after the aggregate, which may run on each shard or on global arrays."""
        result, after = apply_optimizer(
            self.optimizer,
            gradients.values,
            state.inner_state,
            environment.params,
            {**environment.extra_args, **gradients.beside},
            environment.arrays,
            to_params=to_params,
            # Where no shard counts there is nothing to learn from, and weights must not decay.
            nothing=None if gradients.weight is None else gradients.weight == 0,
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

    def arriving(
        self,
        values: Any,
        shards: Shards,
        declared: Incoming | None = None,
        beside: dict[str, Any] | None = None,
        weight: jax.Array | None = None,
    ) -> Gradients:
        """Gradients with what is known of each.

        Args:
          values: a pytree of this shard's arrays.
          shards: the shards that reduce.
          declared: what the caller says they are; ``None`` to go by the pipeline or by types.
          beside: what is reduced with them.
          weight: float[], what this shard counts.

        Raises:
          DoubleReductionError, IncomingError: see ``read_incoming``.
          ArgumentTypeError: a leaf that is sparse, or neither real nor complex.
        """
        declared = declared or self.incoming
        beside = beside or {}

        def status(name: str, leaf: Any, declared: Incoming | None) -> Incoming | None:
            check_gradient_dtype(name, leaf)
            if jnp.result_type(leaf) == jax.dtypes.float0:
                return None
            grouped = not self.over_all_shards
            return read_incoming(
                name, leaf, shards, declared, reduction=self.reduction, grouped=grouped
            )

        def of_tree(tree: Any, declared: Incoming | None) -> list[Incoming | None]:
            paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_sparse)
            return [status(leaf_name(path), leaf, declared) for path, leaf in paths]

        beside_status: list[Incoming | None] = []
        for name in sorted(beside):
            said = self._of_loss(beside[name], shards, declared) if name == "value" else declared
            beside_status += of_tree({name: beside[name]}, said)
        return Gradients(
            values, beside, weight, tuple(of_tree(values, declared)), tuple(beside_status)
        )

    @staticmethod
    def _of_loss(loss: Any, shards: Shards, declared: Incoming | None) -> Incoming | None:
        """What a loss is: each shard's own, unless its type says that it is equal on all."""
        if declared not in (None, Incoming.SCALED):
            return declared
        equal = shards.has_vma and not shards.is_varying(loss)
        return Incoming.REDUCED if equal else Incoming.LOCAL


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


def _is_sparse(leaf: Any) -> bool:
    # Whoever has a sparse array has imported this already; importing it here would bring in SciPy.
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(leaf, sparse.JAXSparse)


def check_gradient_dtype(name: str, gradient: Any) -> None:
    """Raise unless the gradient is a dense array of real or complex numbers (or float0)."""
    if _is_sparse(gradient):
        raise ArgumentTypeError(
            f"{name} is a sparse array ({type(gradient).__name__}); gradients must be dense. "
            f"Write gradient.todense()."
        )
    try:
        dtype = jnp.result_type(gradient)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} must be an array; got {type(gradient).__name__}."
        ) from None
    if not jnp.issubdtype(dtype, jnp.inexact) and dtype != jax.dtypes.float0:
        raise ArgumentTypeError(
            f"{name} has dtype {dtype}; a gradient must be floating, because a mean of {dtype} "
            f"would be rounded."
        )


def check_shapes(gradients: Any, params: Any) -> None:
    """Raise unless gradients have the shapes of the parameters.

    Raises:
      ArgumentError: they have not, as per-example gradients.
    """
    if params is None:
        return
    given, wanted = (
        jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_sparse)
        for tree in (gradients, params)
    )
    if len(given) != len(wanted):
        return
    for (path, gradient), (_, param) in zip(given, wanted, strict=True):
        if jnp.shape(gradient) != jnp.shape(param):
            raise ArgumentError(
                f"{leaf_name(path)} has shape {jnp.shape(gradient)} and its parameter "
                f"{jnp.shape(param)}. Gradients are averaged over the shards one by one, so "
                f"per-example gradients, as optax.contrib.dpsgd takes them, cannot be reduced: "
                f"aggregate them on each shard first."
            )
