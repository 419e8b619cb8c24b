"""CrossShardOptimizer: any Optax optimizer, on gradients reduced over the shards."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from crossshard.errors import (
    ArgumentError,
    IncomingError,
    NestedReductionError,
    ShardContextError,
    VariableError,
    WeightUpdateError,
)
from crossshard.gradients.incoming import Incoming, check_incoming
from crossshard.gradients.reduction import Reduction, check_reduction
from crossshard.optimizer.arguments import check_name, check_pairs
from crossshard.optimizer.optimizer import GradientsAndVariables, Optimizer, describe_optimizer
from crossshard.optimizer.transformation import (
    Transformation,
    check_preprocess,
    check_transformation,
)
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.plan import UpdateStrategy, WeightUpdate, check_weight_update
from crossshard.shards.axes import Shards
from crossshard.shards.context import check_axis_name, check_num_shards
from crossshard.shards.devices import AXIS
from crossshard.shards.groups import check_group_assignment
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import variables_behind


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
    argument ``value``, where an optimizer takes it, is this shard's loss and is reduced alike.

    Args:
      opt: an Optax transformation.
      reduction: ``Reduction.MEAN`` or ``Reduction.SUM``, or ``"mean"`` or ``"sum"``.
      name: a name to find its work by in profiles and HLO.
      group_assignment: a partition of the shards into groups of one size, each of which reduces
        for itself; all shards together if ``None``. Groups part ways: parameters differ.
      preprocess: an Optax transformation, or a ``Stage``, that is applied to each shard's own
        gradient before it is reduced, such as ``optax.clip_by_global_norm(1.0)`` for clipping per
        shard. Its state is one per shard; ``state_specs`` says how it lies.
      axis_name: the mesh axes over which the shards lie; found where the step runs if ``None``.
      incoming: what gradients are when a call of ``update`` does not say.
      weight_update: ``"replicated"``, or ``"sharded"``: in the Optax idiom each shard then has its
        part of the state and updates its part of the parameters (ZeRO-1), which takes an
        elementwise optimizer; ``state_specs`` says how the state lies. ``make_train_step`` shards
        any.

    Raises:
      ArgumentError: a reduction or weight update other than these; an empty name.
      ArgumentTypeError: ``opt`` or ``preprocess`` is not an Optax transformation.
      GroupAssignmentError: groups that are not a partition into equal parts.
      NestedReductionError: ``opt`` is a CrossShardOptimizer.

    >>> import jax, jax.numpy as jnp, optax
    >>> opt = CrossShardOptimizer(optax.sgd(1.0))
    >>> step = lambda gradient: opt.update(gradient, opt.init(gradient))[0]
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    Array([-2., -2.], dtype=float32)
    """

    _own_keywords = ("incoming",)
    _transformation: Transformation

    def __init__(
        self,
        opt: optax.GradientTransformation,
        reduction: str = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: Any = None,
        *,
        preprocess: Any = None,
        axis_name: str | tuple[str, ...] | None = None,
        incoming: str | None = None,
        weight_update: str = WeightUpdate.REPLICATED,
    ):
        reduction = check_reduction(reduction)
        inner = check_transformation(opt)
        _refuse_nested(inner)
        _refuse_nested(preprocess)
        pipeline = Pipeline(
            optax.with_extra_args_support(inner),
            reduction,
            check_group_assignment(group_assignment),
            check_axis_name(axis_name),
            check_incoming(incoming),
            check_preprocess(preprocess),
        )
        wanted = check_weight_update(weight_update)
        if wanted is WeightUpdate.AUTO:
            raise ArgumentError(
                "weight_update='auto' is for make_train_step, which lays out the state itself; an "
                "optimizer is 'replicated' or 'sharded'."
            )
        self._transformation = Transformation(pipeline, wanted, check_name(name))
        self._construct(self._transformation, inner, name)

    @property
    def _pipeline(self) -> Pipeline:
        return self._transformation.pipeline

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
    def weight_update(self) -> str:
        """``"replicated"`` or ``"sharded"``: whether each shard updates all weights or its part."""
        return self._transformation.weight_update

    def state_specs(
        self, params: Any, num_shards: int, axis_name: str | tuple[str, ...] | None = None
    ) -> Any:
        """How the state lies on a mesh, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.

        Args:
          params: the parameters, or their types.
          num_shards: over how many shards.
          axis_name: over which axes; the optimizer's own if ``None``, or ``"shards"``.

        Returns:
          A ``PartitionSpec`` per array of the state.

        Raises:
          WeightUpdateError: the weight update is to be sharded, and the optimizer is not
            elementwise.

        >>> import jax.numpy as jnp, optax
        >>> from jax.sharding import PartitionSpec
        >>> opt = CrossShardOptimizer(optax.trace(0.9), weight_update="sharded")
        >>> specs = opt.state_specs(jnp.zeros((64, 32)), num_shards=8)
        >>> specs.inner_state.trace == PartitionSpec("shards")
        True
        """
        axes = check_axis_name(axis_name) or self._pipeline.axis_name or (AXIS,)
        return self._transformation.specs(params, check_num_shards(num_shards), axes)

    def describe(self) -> str:
        """What happens to a gradient, stage by stage, in one line.

        >>> import optax
        >>> CrossShardOptimizer(optax.sgd(0.1), "sum").describe()
        'local gradient → sum over all shards → update'
        """
        sharded = self._transformation.weight_update is WeightUpdate.SHARDED
        return self._pipeline.describe(UpdateStrategy.PARTS if sharded else None)

    def __repr__(self) -> str:
        return (
            f"CrossShardOptimizer({describe_optimizer(self.inner)}, "
            f"reduction={self.reduction.name}, group_assignment={self.group_assignment}, "
            f"name={self.get_name()!r})"
        )

    def _initial(self, params: Any) -> Any:
        return self._pipeline.init(params)

    def _step(self, gradients: Any, state: Any, params: Any, extra_args: Any) -> tuple[Any, Any]:
        return self._transformation.update_local(gradients, state, params, **extra_args)

    def _may_differ(self, path: Any) -> bool:
        of_preprocess = path[:1] == (jax.tree_util.GetAttrKey("preprocess"),)
        return of_preprocess and self._pipeline.placement_of_preprocess.per_shard

    def _axis_name(self) -> tuple[str, ...]:
        return self._pipeline.axis_name

    def _differentiate(
        self, loss: Callable[[], Any], var_list: Any, grad_loss: Any
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, nnx.Variable]]]:
        """Under MEAN the gradients are those of the loss divided by the shards that reduce."""
        shards = self._pipeline.shards()
        divisor = self._pipeline.divisor(shards.number)
        value, pairs = self._gradients_of(loss, var_list, grad_loss, divisor)
        self._provenance.add([variable for _, variable in pairs], shards.number)
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
            ``compute_gradients``: ``"local"`` (averaged under MEAN), ``"scaled"`` (divided already,
            so only summed, as TensorFlow's ``apply_gradients`` does with any), ``"summed"`` or
            ``"reduced"``.
          **extra_args: what the wrapped optimizer takes besides, such as ``value=loss``.

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
        self._provenance.note_applied(variables)

    def build(self, var_list: Any) -> None:
        """Make the slots of these variables now, as for ``Optimizer``."""
        self._refuse_parts()
        super().build(var_list)

    def _refuse_parts(self) -> None:
        if self._transformation.weight_update is WeightUpdate.SHARDED:
            raise WeightUpdateError(
                "weight_update='sharded' is for the Optax idiom and make_train_step: slots are "
                "variables of the shape of what they belong to, and not parts. Leave it out here."
            )

    def _origin(
        self, variables: list[nnx.Variable], shards: Shards, said: Incoming | None
    ) -> Incoming | None:
        if said is not None:
            return said
        handed_out, known = self._provenance, []
        again = handed_out.first_applied(variables)
        if again is not None and self._pipeline.divisor(shards.number) > 1:
            raise IncomingError(
                f"The gradient of {describe_variable(again)} has been applied already in this "
                f"step. Call compute_gradients again, or say incoming='scaled' to apply the same "
                f"gradients twice."
            )
        for variable in variables:
            number = handed_out.number_of_shards(variable)
            if number not in (None, shards.number):
                raise ShardContextError(
                    f"The gradient of {describe_variable(variable)} was computed under {number} "
                    f"shards and is applied under {shards.number}. Call compute_gradients and "
                    f"apply_gradients in the same step."
                )
            known.append(number is not None)
        if all(known):
            return Incoming.SCALED
        if self._pipeline.incoming is not None or self._pipeline.divisor(shards.number) == 1:
            return None
        stranger = variables[known.index(False)]
        raise IncomingError(
            f"The gradient of {describe_variable(stranger)} does not come from this optimizer's "
            f"compute_gradients in this step, so it is not known whether it is divided by "
            f"{self._pipeline.divisor(shards.number)} already. Say incoming='local' if it is this "
            f"shard's own, to be averaged; or incoming='scaled' if it is divided already, or only "
            f"to be summed, which is what TensorFlow's apply_gradients does."
        )


def pipeline_of(optimizer: CrossShardOptimizer) -> Pipeline:
    """The way of a gradient through an optimizer."""
    return optimizer._pipeline


def refuse_variables_behind(optimizer: CrossShardOptimizer) -> None:
    """Raise if an optimizer closes over variables, which a step without them cannot follow.

    Raises:
      VariableError: it does.
    """
    for variable in variables_behind(optimizer):
        raise VariableError(
            f"The optimizer reads {describe_variable(variable)}, which it closes over: a compiled "
            f"step would go on with the value that it has now. Let a schedule read the count that "
            f"Optax gives it, or keep what changes in the optimizer's state, with "
            f"optax.inject_hyperparams."
        )


def _refuse_nested(inner: Any) -> None:
    """Raise NestedReductionError if an optimizer is, or wraps, a CrossShardOptimizer."""
    wrapped = inner
    while isinstance(wrapped, Optimizer):
        if isinstance(wrapped, CrossShardOptimizer):
            raise NestedReductionError(
                f"{inner!r} reduces over the shards already; wrapping it again would reduce "
                f"twice. Wrap its .inner."
            )
        wrapped = wrapped.inner
