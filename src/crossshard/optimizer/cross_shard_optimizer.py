"""CrossShardOptimizer: an Optax optimizer whose gradients are reduced over the shards."""

import dataclasses
from collections.abc import Callable, Iterable
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
from crossshard.optimizer.node import describe_optimizer
from crossshard.optimizer.optimizer import GradientsAndVariables, Optimizer
from crossshard.optimizer.provenance import ReturnedGradients
from crossshard.optimizer.transformation import (
    Transformation,
    check_preprocess,
    check_transformation,
)
from crossshard.pipeline.accumulate import (
    Accumulate,
    AccumulateState,
    check_accumulate_steps,
)
from crossshard.pipeline.options import check_options
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.plan import UpdateStrategy, WeightUpdate, check_weight_update
from crossshard.pipeline.stage import Environment
from crossshard.pipeline.state import CrossShardState
from crossshard.shards.axes import Shards
from crossshard.shards.context import check_axis_name, check_num_shards
from crossshard.shards.devices import axes_in_sight
from crossshard.shards.groups import check_group_assignment
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import variables_behind

_returned = ReturnedGradients()


class CrossShardOptimizer(Optimizer):
    """An optimizer that averages gradients across shards.

    It is an Optax transformation (``init``, ``update``), for ``optax.chain``, ``nnx.Optimizer``,
    Equinox or your own loop inside ``shard_map``, ``pmap`` or ``vmap(axis_name=…)``. It also
    updates NNX variables in place inside a runner, like ``tf.compat.v1.tpu.CrossShardOptimizer``.
    Both give the same parameters.

    ``update`` takes local gradients unless ``incoming`` declares otherwise: ``"summed"`` (over all
    shards, by autodiff), ``"reduced"`` (already reduced), ``"scaled"`` (divided by the number of
    shards, not summed). Under ``shard_map(check_vma=True)`` the types show it, and a gradient that
    autodiff has summed raises unless declared. The extra argument ``value``, this shard's loss, is
    reduced like the gradients.

    Args:
      opt: an Optax transformation.
      reduction: ``Reduction.MEAN`` or ``Reduction.SUM``, or ``"mean"`` or ``"sum"``.
      name: the name of its scope in profiles and HLO.
      group_assignment: groups of shards, of equal size, each of which reduces independently; all
        shards if ``None``. The parameters of different groups diverge.
      preprocess: an Optax transformation, or a ``Stage``, that is applied to each shard's local
        gradient before it is reduced, such as ``optax.clip_by_global_norm(1.0)`` for clipping per
        shard. Its state is one per shard; ``state_specs`` returns its specs.
      accumulate_steps: the number of calls whose mean gradient is reduced, at the last of them, for
        one update; the others send nothing, and return zeros.
      metrics: names of metrics of each update, such as ``"grad_norm"``, which ``state.metrics``
        holds; ``make_train_step`` lists them.
      reduce_dtype: the dtype in which gradients are sent: ``bfloat16`` halves the bytes. They are
        added in float32.
      loss_scale: ``"dynamic"``, or a ``DynamicLossScale``: updates that are not finite are skipped.
        Pass ``loss_scale=state.loss_scale`` to ``crossshard.value_and_grad``, which scales the
        loss; ``compute_gradients`` and ``make_train_step`` scale it themselves.
      master_dtype: ``float32``: the state holds the parameters in this dtype too, and those of 16
        bits are rounded from them; a parameter that is set in between becomes its master.
      ema: the decay of a moving average of the parameters, such as 0.999, or a schedule, a
        function of the number of updates so far. The state holds the average:
        ``optax.tree.get(state, "ema")``.
      nonfinite: what to do about a gradient that is NaN or infinite: ``"quarantine"`` leaves the
        shard out of the mean, ``"skip"`` leaves parameters and state as they were, on all shards.
        ``state.nonfinite`` names the shard and the leaf. See ``Nonfinite``.
      axis_name: the mesh axes of the shards; inferred from the bound axes if ``None``.
      incoming: the default of ``update``'s ``incoming``.
      weight_update: ``"replicated"``, or ``"sharded"``: each shard updates its slice of the
        parameters and has its slice of the optimizer state (ZeRO-1). In the Optax idiom the
        optimizer must be elementwise, and ``state_specs`` returns the specs of the state;
        ``make_train_step`` shards any optimizer.

    Raises:
      ArgumentError: an unknown reduction or weight update, or an empty name.
      ArgumentTypeError: ``opt`` or ``preprocess`` is not an Optax transformation.
      GroupAssignmentError: groups that do not partition the shards, or are not of equal size.
      NestedReductionError: ``opt`` is a CrossShardOptimizer.

    >>> import jax, jax.numpy as jnp, optax
    >>> opt = CrossShardOptimizer(optax.sgd(1.0))
    >>> step = lambda gradient: opt.update(gradient, opt.init(gradient))[0]
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    Array([-2., -2.], dtype=float32)
    """

    _own_keywords = ("incoming", "weight")
    _transformation: Transformation

    def __init__(
        self,
        opt: optax.GradientTransformation,
        reduction: str = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: Any = None,
        *,
        preprocess: Any = None,
        accumulate_steps: int = 1,
        metrics: str | Iterable[str] = (),
        reduce_dtype: Any = None,
        loss_scale: Any = None,
        master_dtype: Any = None,
        ema: float | Callable[[Any], Any] | None = None,
        nonfinite: Any = None,
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
            preprocess=check_preprocess(preprocess),
            **check_options(
                metrics=metrics,
                reduce_dtype=reduce_dtype,
                loss_scale=loss_scale,
                master_dtype=master_dtype,
                ema=ema,
                nonfinite=nonfinite,
            ),
        )
        if check_accumulate_steps(accumulate_steps) > 1:
            pipeline = dataclasses.replace(pipeline, accumulate=Accumulate(accumulate_steps))
        where = check_weight_update(weight_update)
        if where is WeightUpdate.AUTO:
            raise ArgumentError(
                "weight_update='auto' is for make_train_step, which shards the state itself; pass "
                "'replicated' or 'sharded'."
            )
        self._transformation = Transformation(pipeline, where, check_name(name))
        self._construct(self._transformation, inner, name)

    @property
    def _pipeline(self) -> Pipeline:
        return self._transformation.pipeline

    @property
    def reduction(self) -> Reduction:
        """The reduction of the gradients."""
        return self._pipeline.reduction

    @property
    def group_assignment(self) -> list[list[int]] | None:
        """The groups of shards that reduce together; ``None`` for all shards."""
        groups = self._pipeline.groups
        return None if groups is None else [list(group) for group in groups.groups]

    @property
    def weight_update(self) -> str:
        """``"replicated"`` or ``"sharded"``: each shard updates all weights, or its slice."""
        return self._transformation.weight_update

    def state_specs(
        self, params: Any, num_shards: int, axis_name: str | tuple[str, ...] | None = None
    ) -> Any:
        """The specs of the state, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.

        Args:
          params: the parameters, or their shapes and dtypes.
          num_shards: the number of shards.
          axis_name: the mesh axes that count shards. If ``None``, those of the optimizer; else
            ``"shards"``, or all axes of the mesh that ``params`` lie on, or that
            ``jax.set_mesh`` has set.

        Returns:
          A ``PartitionSpec`` per array of the state.

        Raises:
          AxisError: that mesh has no axis ``"shards"``, and its axes do not count ``num_shards``.
          WeightUpdateError: ``weight_update="sharded"`` with an optimizer that is not elementwise.

        >>> import jax.numpy as jnp, optax
        >>> from jax.sharding import PartitionSpec
        >>> opt = CrossShardOptimizer(optax.trace(0.9), weight_update="sharded")
        >>> specs = opt.state_specs(jnp.zeros((64, 32)), num_shards=8)
        >>> specs.inner_state.trace == PartitionSpec("shards")
        True
        """
        number = check_num_shards(num_shards)
        named = check_axis_name(axis_name) or self._pipeline.axis_name
        return self._transformation.specs(params, number, named or axes_in_sight(params, number))

    def describe(self) -> str:
        """The stages of the pipeline in one line.

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

    def _step(
        self, gradients: Any, state: Any, params: Any, extra_args: Any
    ) -> tuple[Any, Any, jax.Array | None]:
        updates, after, reduced = self._transformation.update_local(
            gradients, state, params, **extra_args
        )
        skip = reduced.skip
        if skip is not None and not self._pipeline.over_all_shards:
            # Groups may differ, and a global step is one for all of them.
            shards, groups = self._pipeline.shards(warn=False), self._pipeline.groups
            skip = Environment(shards, groups).on_all_shards(skip)
        return updates, after, skip

    def _may_differ(self, path: Any) -> bool:
        state = CrossShardState(**dict.fromkeys(CrossShardState._fields, (0,)))
        state = state._replace(accumulate=AccumulateState(0, 0, 0, 0))
        placements = self._pipeline.placements(state)
        return any(
            path[:1] == (jax.tree_util.GetAttrKey(name),)
            and any(placement.per_shard for placement in jax.tree.leaves(getattr(placements, name)))
            for name in CrossShardState._fields
        )

    def _axis_name(self) -> tuple[str, ...]:
        return self._pipeline.axis_name

    def _differentiate(
        self, loss: Callable[[], Any], var_list: Any, grad_loss: Any
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, nnx.Variable]]]:
        """Under MEAN the loss is divided by the number of shards that reduce together."""
        shards = self._pipeline.shards()
        divisor = self._pipeline.divisor(shards.number)
        value, pairs = self._gradients_of(loss, var_list, grad_loss, divisor, self._loss_scale())
        self._provenance.add([variable for _, variable in pairs], shards.number)
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        _returned.add(gradients, self._functions.given, shards.number)
        return value, pairs

    def _loss_scale(self) -> jax.Array | None:
        """The current scale of the loss; ``None`` without one."""
        stage, state = self._pipeline.loss_scale, self._slots.tree
        if stage is None:
            return None
        return stage.init(None).scale if state is None else state.loss_scale.scale.get_value()

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: nnx.Variable | None = None,
        name: str | None = None,
        *,
        incoming: str | None = None,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> None:
        """Sum the gradients over the shards or groups and update the variables.

        Args:
          grads_and_vars: ``(gradient, variable)`` pairs; those without a gradient are skipped.
          global_step: an integer variable that is incremented by 1 after the update.
          name: the name of this step's scope in profiles and HLO.
          incoming: the status of gradients that do not come from this optimizer's
            ``compute_gradients``: ``"local"`` (averaged under MEAN), ``"scaled"`` (already divided,
            so only summed, as TensorFlow's ``apply_gradients`` sums all), ``"summed"`` or
            ``"reduced"``.
          weight: float[], the weight of this shard in the mean, which is then
            ``sum(w · g) / sum(w)``. The gradients of a shard of weight 0 may be NaN; if all
            weights are 0, nothing changes.
          **extra_args: extra arguments of the inner optimizer, such as ``value=loss``.

        Raises:
          ArgumentError, ArgumentTypeError, VariableError: see ``Optimizer``.
          IncomingError: under MEAN, gradients that ``compute_gradients`` did not return in this
            step, without ``incoming``.
          ShardContextError: gradients that were computed with another number of shards.
        """
        self._refuse_parts()
        pairs = check_pairs(grads_and_vars)
        shards = self._pipeline.shards(warn=False)
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        origin = self._origin(given, shards, check_incoming(incoming))
        super().apply_gradients(
            pairs, global_step, name, incoming=origin, weight=weight, **extra_args
        )
        self._provenance.note_applied([variable for _, variable in given])

    def build(self, var_list: Any) -> None:
        """Create the slots of these variables now; see ``Optimizer.build``."""
        self._refuse_parts()
        super().build(var_list)

    def _refuse_parts(self) -> None:
        if self._transformation.weight_update is WeightUpdate.SHARDED:
            raise WeightUpdateError(
                "weight_update='sharded' is for the Optax idiom and make_train_step: a slot has "
                "the full shape of its variable. Leave weight_update out here."
            )

    def _origin(
        self, given: list[tuple[Any, nnx.Variable]], shards: Shards, declared: Incoming | None
    ) -> Incoming | None:
        if declared is not None:
            return declared
        variables = [variable for _, variable in given]
        provenance, known = self._provenance, []
        again = provenance.first_applied(variables)
        if again is not None and self._pipeline.divisor(shards.number) > 1:
            raise IncomingError(
                f"The gradient of {describe_variable(again)} has been applied already in this "
                f"step. Call compute_gradients again, or pass incoming='scaled' to apply the same "
                f"gradients twice."
            )
        for gradient, variable in given:
            number = provenance.number_of_shards(variable)
            if number is None:
                number = _returned.number_of_shards(gradient, self._functions.given)
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
        unknown = variables[known.index(False)]
        raise IncomingError(
            f"The gradient of {describe_variable(unknown)} does not come from this optimizer's "
            f"compute_gradients in this step, so it may or may not be divided by "
            f"{self._pipeline.divisor(shards.number)} already. Pass incoming='local' to average "
            f"local gradients, or incoming='scaled' if they are divided already, or only to be "
            f"summed, which is what TensorFlow's apply_gradients does."
        )


def pipeline_of(optimizer: CrossShardOptimizer, **options: Any) -> Pipeline:
    """The pipeline of an optimizer, with further options, see ``check_options``.

    Raises:
      ArgumentError: the optimizer has such an option already.
    """
    pipeline, given = optimizer._pipeline, check_options(**options)
    for name in given:
        if getattr(pipeline, name):
            raise ArgumentError(
                f"Both the optimizer and make_train_step were given {name}. Pass it to one of them."
            )
    return dataclasses.replace(pipeline, **given)


def refuse_variables_behind(optimizer: CrossShardOptimizer) -> None:
    """Raise if an optimizer closes over variables, which a compiled step would not update.

    Raises:
      VariableError: it closes over a variable.
    """
    for variable in variables_behind(optimizer):
        raise VariableError(
            f"The optimizer reads {describe_variable(variable)}, which it closes over: a compiled "
            f"step would keep its current value. Let a schedule read the count that Optax passes "
            f"to it, or keep values that change in the optimizer's state, with "
            f"optax.inject_hyperparams."
        )


def _refuse_nested(inner: Any) -> None:
    """Raise NestedReductionError if an optimizer is, or wraps, a CrossShardOptimizer."""
    wrapped = inner
    while isinstance(wrapped, Optimizer):
        if isinstance(wrapped, CrossShardOptimizer):
            raise NestedReductionError(
                f"{inner!r} already reduces over the shards; wrapping it again would reduce "
                f"twice. Wrap its .inner."
            )
        wrapped = wrapped.inner
