"""CrossShardOptimizer: any Optax rule, on gradients reduced over the shards."""

from collections.abc import Callable
from typing import Any, Self

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from crossshard.errors import (
    ArgumentError,
    IncomingError,
    NestedReductionError,
    ShardContextError,
    WeightUpdateError,
)
from crossshard.gradients.incoming import Incoming, check_incoming
from crossshard.gradients.once import only_reduction
from crossshard.gradients.pipeline import Pipeline
from crossshard.gradients.reduction import Reduction, check_reduction
from crossshard.optimizer.arguments import check_name, check_pairs
from crossshard.optimizer.optimizer import GradientsAndVariables, Optimizer, describe_rule
from crossshard.optimizer.transformation import check_transformation, cross_shard
from crossshard.optimizer.weight_update import (
    WeightUpdate,
    check_weight_update,
    map_cuts,
    plan_update,
)
from crossshard.shards.axes import Shards
from crossshard.shards.context import check_axis_name, check_num_shards
from crossshard.shards.devices import AXIS
from crossshard.shards.groups import check_group_assignment
from crossshard.variables.describe import describe_variable
from crossshard.variables.handing import current_trace


class CrossShardOptimizer(Optimizer):
    """An optimizer that averages gradients across shards.

    It is an Optax transformation (``init``, ``update``), for ``optax.chain``, ``nnx.Optimizer``,
    Equinox or a loop of one's own inside ``shard_map``, ``pmap`` or ``vmap(axis_name=…)``; and it
    steps NNX variables in place, as ``tf.compat.v1.tpu.CrossShardOptimizer`` does, inside the
    runners. Both follow the same trajectory.

    In ``update``, gradients are this shard's own unless ``incoming`` says otherwise: ``"summed"``
    (by autodiff, over all shards), ``"reduced"`` (nothing is left to do), ``"scaled"`` (divided by
    the number of shards and not summed). Under ``shard_map(check_vma=True)`` types tell, and a
    gradient that autodiff has summed is refused unless the caller says what it is. The extra
    argument ``value``, where a rule takes it, is this shard's loss and is reduced alike.

    Args:
      opt: an Optax transformation.
      reduction: ``Reduction.MEAN`` or ``Reduction.SUM``, or ``"mean"`` or ``"sum"``.
      name: a name to find its work by in profiles and HLO.
      group_assignment: a partition of the shards into groups of one size, each of which reduces
        for itself; all shards together if ``None``. Groups part ways: parameters differ.
      axis_name: the mesh axes over which the shards lie; found where the step runs if ``None``.
      incoming: what gradients are when a call of ``update`` does not say.
      weight_update: ``"replicated"``, or ``"sharded"``: in the Optax idiom each shard then has its
        part of the state and updates its part of the parameters (ZeRO-1), which takes a rule that
        is elementwise; ``state_specs`` says how the state lies. ``make_train_step`` shards any.

    Raises:
      ArgumentError: a reduction or weight update other than these; an empty name.
      ArgumentTypeError: ``opt`` is no Optax transformation.
      GroupAssignmentError: groups that are no partition into equal parts.
      NestedReductionError: ``opt`` is a CrossShardOptimizer.

    >>> import jax, jax.numpy as jnp, optax
    >>> opt = CrossShardOptimizer(optax.sgd(1.0))
    >>> step = lambda gradient: opt.update(gradient, opt.init(gradient))[0]
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    Array([-2., -2.], dtype=float32)
    """

    _pipeline: Pipeline
    _weight_update: WeightUpdate
    # What compute_gradients handed out and apply_gradients has not taken, by the variable's id.
    _handed_out: dict[int, tuple[nnx.Variable, int, Any]]

    def __new__(
        cls,
        opt: optax.GradientTransformation,
        reduction: str = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: Any = None,
        *,
        axis_name: str | tuple[str, ...] | None = None,
        incoming: str | None = None,
        weight_update: str = WeightUpdate.REPLICATED,
    ) -> Self:
        reduction = check_reduction(reduction)
        inner = check_transformation(opt)
        wrapped: Any = inner
        while isinstance(wrapped, Optimizer):
            if isinstance(wrapped, CrossShardOptimizer):
                raise NestedReductionError(
                    f"{opt!r} reduces over the shards already; wrapping it again would reduce "
                    f"twice. Wrap its .inner."
                )
            wrapped = wrapped.inner
        pipeline = Pipeline(
            reduction,
            check_group_assignment(group_assignment),
            check_axis_name(axis_name),
            check_incoming(incoming),
        )
        name, wanted = check_name(name), check_weight_update(weight_update)
        if wanted is WeightUpdate.AUTO:
            raise ArgumentError(
                "weight_update='auto' is for make_train_step, which lays out the state itself; an "
                "optimizer is 'replicated' or 'sharded'."
            )
        self = cls._make_one(cross_shard(inner, pipeline, name, wanted), inner, name)
        self._pipeline = pipeline
        self._weight_update = wanted
        self._handed_out = {}
        return self

    @property
    def reduction(self) -> Reduction:
        """How gradients are reduced."""
        return self._pipeline.reduction

    @property
    def group_assignment(self) -> list[list[int]] | None:
        """Which shards reduce with which; ``None`` for all of them together."""
        groups = self._pipeline.groups
        return None if groups is None else [list(group) for group in groups.groups]

    @property
    def pipeline(self) -> Pipeline:
        """What happens to a gradient, as data."""
        return self._pipeline

    @property
    def weight_update(self) -> WeightUpdate:
        """Whether each shard updates all weights, or its part of them."""
        return self._weight_update

    def state_specs(
        self, params: Any, num_shards: int, axis_name: str | tuple[str, ...] | None = None
    ) -> Any:
        """How the state of a sharded weight update lies on a mesh.

        Args:
          params: the parameters, or their types.
          num_shards: over how many shards.
          axis_name: over which axes; the optimizer's own if ``None``, or ``"shards"``.

        Returns:
          A ``PartitionSpec`` per array of the state, for ``in_specs`` and ``out_specs`` of
          ``jax.shard_map``.

        Raises:
          WeightUpdateError: the rule is not elementwise.

        >>> import jax.numpy as jnp, optax
        >>> opt = CrossShardOptimizer(optax.trace(0.9), weight_update="sharded")
        >>> opt.state_specs(jnp.zeros((64, 32)), num_shards=8).trace == PartitionSpec("shards")
        True
        """
        axes = check_axis_name(axis_name) or self._pipeline.axis_name or (AXIS,)
        number = check_num_shards(num_shards)
        inner = optax.with_extra_args_support(self.inner)
        state = jax.eval_shape(inner.init, params)
        groups = self._pipeline.groups
        if groups is not None:
            # Each shard has its own part of its group's state, or a copy of what is not cut.
            own = lambda x: PartitionSpec(axes) if x.shape else PartitionSpec()
            return jax.tree.map(own, state)
        with only_reduction():
            plan = plan_update(inner, params, number, self._weight_update, only_parts=True)
        return map_cuts(lambda cut, _: cut.spec(axes), plan.state, state)

    def describe(self) -> str:
        """What happens to a gradient, stage by stage, in one line.

        >>> import optax
        >>> CrossShardOptimizer(optax.sgd(0.1), "sum").describe()
        'local gradient → sum over all shards → update'
        """
        return self._pipeline.describe()

    def __repr__(self) -> str:
        return (
            f"CrossShardOptimizer({describe_rule(self.inner)}, reduction={self.reduction.name}, "
            f"group_assignment={self.group_assignment}, name={self.get_name()!r})"
        )

    def _construction(self) -> dict[str, Any]:
        return {
            **super()._construction(),
            "reduction": self.reduction,
            "group_assignment": self._pipeline.groups,
            "axis_name": self._pipeline.axis_name or None,
            "incoming": self._pipeline.incoming,
            "weight_update": self._weight_update,
        }

    def _axis_name(self) -> tuple[str, ...]:
        return self._pipeline.axis_name

    def _differentiate(
        self, loss: Callable[[], Any], var_list: Any, grad_loss: Any
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, nnx.Variable]]]:
        """Under MEAN the gradients are those of the loss divided by the shards that reduce."""
        shards = self._pipeline.shards()
        value, pairs = self._gradients_of(loss, var_list, grad_loss, self._pipeline.divisor(shards))
        trace = current_trace()
        for _, variable in pairs:
            self._handed_out[id(variable)] = (variable, shards.number, trace)
        return value, pairs

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: nnx.Variable | None = None,
        name: str | None = None,
        *,
        incoming: str | None = None,
        **extra_args: Any,
    ) -> None:
        """Sum the gradients over the shards, or the groups, and step the variables.

        Args:
          grads_and_vars: ``(gradient, variable)`` pairs; pairs without a gradient are passed over.
          global_step: an integer variable that is incremented by 1 after the update.
          name: a name to find this step by in profiles and HLO.
          incoming: what the gradients are, where they do not come from this optimizer's
            ``compute_gradients``: ``"local"`` (ours divides under MEAN), ``"scaled"`` (divided
            already), ``"summed"`` or ``"reduced"``.
          **extra_args: what the wrapped rule takes besides, such as ``value=loss``.

        Raises:
          ArgumentError, ArgumentTypeError, VariableError: as for ``Optimizer``.
          IncomingError: under MEAN, gradients that ``compute_gradients`` did not hand out in this
            step, with nothing said of them.
          ShardContextError: they were computed under another number of shards.
        """
        self._refuse_parts()
        pairs = check_pairs(grads_and_vars)
        shards = self._pipeline.shards(warn=False)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        origin = self._origin(variables, shards, check_incoming(incoming))
        super().apply_gradients(pairs, global_step, name, incoming=origin, **extra_args)
        for variable in variables:
            self._handed_out.pop(id(variable), None)

    def build(self, var_list: Any) -> None:
        """Make the slots of these variables now, as for ``Optimizer``."""
        self._refuse_parts()
        super().build(var_list)

    def _refuse_parts(self) -> None:
        if self._weight_update is WeightUpdate.SHARDED:
            raise WeightUpdateError(
                "weight_update='sharded' is for the Optax idiom and make_train_step: slots are "
                "variables of the shape of what they belong to, and not parts. Leave it out here."
            )

    def _origin(
        self, variables: list[nnx.Variable], shards: Shards, said: Incoming | None
    ) -> Incoming | None:
        if said is not None:
            return said
        trace = current_trace()
        known = []
        for variable in variables:
            _, number, when = self._handed_out.get(id(variable), (None, None, None))
            if number is not None and number != shards.number:
                raise ShardContextError(
                    f"The gradient of {describe_variable(variable)} was computed under {number} "
                    f"shards and is applied under {shards.number}. Call compute_gradients and "
                    f"apply_gradients in the same step."
                )
            known.append(number is not None and when == trace)
        if all(known):
            return Incoming.SCALED
        if self._pipeline.incoming is not None or self._pipeline.divisor(shards) == 1:
            return None
        stranger = variables[known.index(False)]
        raise IncomingError(
            f"The gradient of {describe_variable(stranger)} does not come from this optimizer's "
            f"compute_gradients in this step, so it is not known whether it is divided by "
            f"{self._pipeline.divisor(shards)} already. Say incoming='local' if it is this "
            f"shard's own (it will be divided), or incoming='scaled' if it is divided."
        )
