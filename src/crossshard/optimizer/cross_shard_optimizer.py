"""CrossShardOptimizer: an Optax optimizer whose gradients are reduced over the shards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NoReturn, Self, TypeAlias, Unpack, final

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from crossshard import _check, _flax
from crossshard._annotations import Groups, PyTree
from crossshard._flax import AnyVariable, nnx
from crossshard.errors import ArgumentError, ArgumentTypeError, NestedReductionError
from crossshard.gradients.status import GradientStatus, Reduction, check_incoming, check_reduction
from crossshard.nnx.binding import check_writable
from crossshard.nnx.computed import Computed
from crossshard.nnx.differentiate import differentiate
from crossshard.nnx.graph import HasSlots
from crossshard.nnx.making import check_structure, explained, keyed_variables, make_missing_slots
from crossshard.nnx.names import named_variables, trained_by_default
from crossshard.nnx.read_only import read_only
from crossshard.nnx.slots import SlotStore, as_params
from crossshard.optimizer.arguments import (
    check_gates,
    check_global_step,
    check_keywords,
    check_loss,
    check_name,
    check_pairs,
    check_whole,
    reads,
)
from crossshard.optimizer.node import register_node
from crossshard.optimizer.transformation import Transformation
from crossshard.pipeline.options import Options
from crossshard.pipeline.pipeline import Pipeline, check_names
from crossshard.pipeline.stage import CrossShardState, Stage
from crossshard.pipeline.stages.preprocess import Preprocess, check_transformation
from crossshard.pipeline.update.arrays import Parts
from crossshard.pipeline.update.plan import WeightUpdate, check_weight_update
from crossshard.shards.axes import (
    Shards,
    check_axis_name,
    check_group_assignment,
    check_num_shards,
    shards_of_gradient,
)
from crossshard.shards.devices import axes_in_sight

GradientsAndVariables: TypeAlias = "Iterable[tuple[jax.Array | None, AnyVariable]]"
VariableList: TypeAlias = "nnx.Pytree | AnyVariable | Sequence[nnx.Pytree | AnyVariable]"


@final
class CrossShardOptimizer(optax.GradientTransformationExtraArgs, HasSlots):
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
      axis_name: the mesh axes of the shards; inferred from the bound axes if ``None``.
      incoming: the default of ``update``'s ``incoming``.
      weight_update: ``"replicated"``, or ``"sharded"``: each shard updates its slice of the
        parameters and has its slice of the optimizer state (ZeRO-1). In the Optax idiom the
        optimizer must be elementwise, and ``state_specs`` returns the specs of the state;
        ``make_train_step`` shards any optimizer.
      **options: stages to add: ``accumulate_steps``, ``metrics``, ``reduce_dtype``,
        ``loss_scale``, ``master_dtype``, ``ema``, ``nonfinite``; see
        ``crossshard.pipeline.Options``.

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

    GATE_NONE = 0
    GATE_OP = 1
    GATE_GRAPH = 2

    _transformation: Transformation
    # The trace in which it was created; None if NNX or JAX rebuilt it from its leaves.
    _made_in: Any

    def __new__(
        cls,
        opt: optax.GradientTransformation,
        reduction: str = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: Groups | None = None,
        *,
        preprocess: optax.GradientTransformation | Stage | None = None,
        axis_name: str | tuple[str, ...] | None = None,
        incoming: str | None = None,
        weight_update: str = WeightUpdate.REPLICATED,
        **options: Unpack[Options],
    ) -> Self:
        check_names(CrossShardOptimizer, options, Options)
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
            options={"preprocess": preprocess, **options},
        )
        where = check_weight_update(weight_update)
        if where is WeightUpdate.AUTO:
            raise ArgumentError(
                "weight_update='auto' is for make_train_step, which shards the state itself; pass "
                "'replicated' or 'sharded'."
            )
        transformation = Transformation(pipeline, where, check_name(name), inner)
        # Flax learns that it is a node before it can meet one.
        _flax.load()
        return cls._made(transformation, SlotStore(), _flax.current_trace())

    @classmethod
    def _made(cls, transformation: Transformation, slots: SlotStore, made_in: Any = None) -> Self:
        """An optimizer; ``made_in`` is ``None`` for one that JAX or NNX rebuilds from its parts."""
        self = super().__new__(cls, transformation.init, transformation.update)
        self._transformation = transformation
        self._made_in = made_in
        self.slots = slots
        self.computed = Computed()
        return self

    def __init_subclass__(cls) -> NoReturn:
        raise ArgumentTypeError(
            "CrossShardOptimizer has no subclasses. Write what is to happen to the reduced "
            "gradients as an Optax transformation and wrap that, optax.chain(yours, optax.adam("
            "1e-3)); what is to happen to each shard's own is preprocess=."
        )

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return repr(self._transformation)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # With other slots, and no variables until it meets theirs.
        memo[id(self)] = new = jax.tree.map(lambda x: x, self)
        return new

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "A CrossShardOptimizer cannot be pickled, since Optax's transformations are functions "
            "within functions. Save opt.state, or nnx.state(opt); create the optimizer anew, call "
            "build(model), and restore the state into it."
        )

    @property
    def inner(self) -> optax.GradientTransformation:
        """The wrapped transformation."""
        return self._transformation.inner

    def get_name(self) -> str:
        """The name given at construction."""
        return self._transformation.name

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
        self, params: PyTree, num_shards: int, axis_name: str | tuple[str, ...] | None = None
    ) -> CrossShardState:
        """The specs of the state, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.

        Args:
          params: the parameters, or their shapes and dtypes.
          num_shards: the number of shards.
          axis_name: the shard axes. If ``None``, those of the optimizer; else
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
        return self._pipeline.describe(Parts.steps) if sharded else self._pipeline.describe()

    # The stateful idiom.

    def compute_gradients(
        self,
        loss: Callable[[], ArrayLike],
        var_list: VariableList | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: ArrayLike | None = None,
    ) -> list[tuple[jax.Array | None, AnyVariable]]:
        """The gradients of a loss with respect to variables, before any reduction.

        Under MEAN the loss is divided by the number of shards that reduce together.

        Args:
          loss: a function without arguments that returns a floating scalar. What it writes to
            besides, such as batch statistics, was given to the step, or is below ``var_list``.
          var_list: an NNX module, or a list of variables; every ``nnx.Param`` that was given to
            the step if ``None``.
          gate_gradients: 0, 1 or 2; this argument and the next two are TensorFlow's, and have no
            effect under XLA.
          aggregation_method: see ``gate_gradients``.
          colocate_gradients_with_ops: see ``gate_gradients``.
          grad_loss: a scalar that multiplies the gradients.

        Returns:
          ``(gradient, variable)`` pairs; the gradient is ``None`` if the loss does not depend on
          the variable.

        Raises:
          ArgumentError, ArgumentTypeError: the loss is not a function or does not return a scalar,
            or there are no variables.
          VariableError: a variable that is not floating, or a duplicate; or the loss writes to one
            that was not given.
          VariableTypeError: an item of ``var_list`` is no variable.
        """
        del aggregation_method, colocate_gradients_with_ops
        check_gates(gate_gradients)
        return self._compute(loss, var_list, grad_loss)[1]

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: AnyVariable | None = None,
        name: str | None = None,
        *,
        incoming: str | None = None,
        weight: ArrayLike | None = None,
        **extra_args: PyTree,
    ) -> None:
        """Sum the gradients over the shards or groups and update the variables.

        Args:
          grads_and_vars: ``(gradient, variable)`` pairs; those without a gradient are skipped.
          global_step: an integer variable that is incremented by 1 after the update, unless the
            update is skipped.
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
          ArgumentError, ArgumentTypeError: no pairs, no gradients, or an item that is not a pair;
            an optimizer whose state cannot be slots; a keyword that the optimizer does not read.
          VariableError: a duplicate variable, one of another shape than its gradient, or one that
            was not given to the step.
          IncomingError: under MEAN, gradients that ``compute_gradients`` did not return in this
            step, without ``incoming``.
          ShardContextError: gradients that were computed with another number of shards.
        """
        check_whole(self._transformation.weight_update)
        pairs = check_pairs(grads_and_vars)
        check_global_step(global_step)
        scope = contextlib.nullcontext() if name is None else jax.named_scope(check_name(name))
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        variables = [variable for _, variable in given]
        counted = [] if global_step is None else [global_step]
        for variable in [*variables, *counted, *self.slots.all()]:
            check_writable(variable)
        origin = check_incoming(incoming) or self._origin(variables)
        if incoming is None and origin is GradientStatus.SCALED and weight is None:
            weight = self.computed.weight
        keyed = keyed_variables(self, variables, [variable for _, variable in pairs])
        run = self._transformation.transformations
        is_stage = not isinstance(self._pipeline.preprocess, Preprocess | None)
        check_keywords(run, as_params(keyed), extra_args, a_stage_may_read=is_stage)
        self._make_missing_slots(keyed)
        gradients = {key: jnp.asarray(g) for key, (g, _) in zip(keyed, given, strict=True)}
        params, before = as_params(keyed), self.slots.values(keyed)
        with scope, explained(self._transformation.of_optax):
            updates, after, reduced = self._transformation.update_local(
                gradients, before, params, origin, weight, extra_args
            )
            stepped = optax.apply_updates(params, updates)
        check_structure(self._transformation.of_optax, before, after)
        for key, variable in keyed.items():
            variable.set_value(stepped[key])
        self.slots.write(keyed, after)
        self.computed.note_applied(variables)
        for variable in counted:
            count, skip = variable.get_value(), self._pipeline.skips_everywhere(reduced.skip)
            variable.set_value(count + 1 if skip is None else jnp.where(skip, count, count + 1))

    def minimize(
        self,
        loss: Callable[[], ArrayLike],
        global_step: AnyVariable | None = None,
        var_list: VariableList | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: ArrayLike | None = None,
        **extra_args: PyTree,
    ) -> jax.Array:
        """``compute_gradients`` and ``apply_gradients``; returns this shard's loss, unscaled.

        The loss is also passed to inner optimizers that read ``value=``. For arguments and errors
        see the two methods.
        """
        del aggregation_method, colocate_gradients_with_ops
        check_gates(gate_gradients)
        value, pairs = self._compute(loss, var_list, grad_loss)
        params = as_params(keyed_variables(self, [variable for _, variable in pairs]))
        # A loss that is not read would still be summed over the shards.
        with_loss = {"value": value, **extra_args}
        used = reads(self._transformation.transformations, params, "value", with_loss)
        extra_args = extra_args if used is False else with_loss
        self.apply_gradients(pairs, global_step, name, **extra_args)
        return value

    def build(self, var_list: VariableList) -> None:
        """Create the slots of these variables now instead of at the first step.

        Args:
          var_list: an NNX module, or a list of variables.

        Raises:
          ArgumentError: the inner optimizer's state cannot be slots.
          VariableError, VariableTypeError: see ``compute_gradients``.
        """
        check_whole(self._transformation.weight_update)
        found = named_variables(var_list)
        self.computed.names.update(found)
        self._make_missing_slots(
            keyed_variables(self, [variable for variable, _ in found.values()])
        )

    def get_slot(self, var: AnyVariable | str, name: str) -> AnyVariable | None:
        """The slot of a variable, as a variable; ``None`` if there is no such slot.

        ``var`` is the variable, or its name in ``state``: its path in the module, as in
        ``get_slot("dense/kernel", "m")``.

        Names are those of the fields of the Optax state (``mu``, ``nu``, ``trace``,
        ``sum_of_squares`` …) or TensorFlow's (``m``, ``v``, ``momentum``, ``accumulator`` …).

        Raises:
          ArgumentTypeError: ``var`` is no variable and no name, or ``name`` is none.
        """
        if not isinstance(var, str | nnx.Variable):
            raise ArgumentTypeError(
                f"var must be an nnx variable, or its name; got {_check.described(var)}."
            )
        return self.slots.find(var, _check.word("name", name, "It is that of a slot, such as 'm'."))

    def get_slot_names(self) -> list[str]:
        """The names of the slots, as Optax names them; empty before the first step."""
        return self.slots.slot_names()

    def variables(self) -> list[AnyVariable]:
        """Every variable of the state: slots and shared ones, such as a step count."""
        return self.slots.all()

    @property
    def state(self) -> CrossShardState | None:
        """A copy of the Optax state, a pytree of arrays; ``None`` before the first step.

        Hyperparameters raise an ArgumentTypeError if they are written to, which would change
        nothing.

        Assign a pytree of the same structure to restore it, after ``build`` or a first step, or to
        change it: ``opt.state = optax.tree.set(opt.state, learning_rate=jnp.float32(0.01))``.
        """
        state: CrossShardState | None = read_only(self.slots.values())
        return state

    @state.setter
    def state(self, state: CrossShardState) -> None:
        self.slots.restore(state, self._pipeline.may_differ)

    # What the methods share.

    def _compute(
        self,
        loss: Callable[[], ArrayLike],
        var_list: VariableList | None,
        grad_loss: ArrayLike | None,
    ) -> tuple[jax.Array, list[tuple[jax.Array | None, AnyVariable]]]:
        """This shard's loss, and the pairs that ``compute_gradients`` returns."""
        loss, axes = check_loss(loss), self._pipeline.axis_name
        shards = self._pipeline.shards()
        found = named_variables(trained_by_default() if var_list is None else var_list)
        variables = [variable for variable, _ in found.values()]
        value, gradients, empty = differentiate(
            loss,
            variables,
            shards_of_gradient(axes),
            self._pipeline.divisor(shards.size),
            grad_loss,
            var_list,
            self._loss_scale(),
            axes,
            self._shards_of_mean,
        )
        self.computed.add(found, shards.number, empty)
        return value, list(zip(gradients, variables, strict=True))

    def _shards_of_mean(self) -> Shards:
        """The shards over which a ``Mean`` is counted; raises if this optimizer takes none."""
        pipeline = self._pipeline
        if pipeline.reduction is Reduction.SUM:
            raise ArgumentError(
                "The loss returns a Mean, which is a mean over the whole batch, and this "
                "optimizer's reduction is SUM, which adds up the losses of shards. Use MEAN."
            )
        if pipeline.accumulate is not None:
            raise ArgumentError(
                f"The loss returns a Mean, and this optimizer accumulates over "
                f"{pipeline.accumulate.steps} calls, of which the later ones have not been counted "
                f"yet. Pass accumulate_steps to make_train_step, which counts all rows first."
            )
        if pipeline.excludes_shards:
            raise ArgumentError(
                "The loss returns a Mean, whose gradients have to be computed again without a "
                "shard that nonfinite='quarantine' leaves out. Use make_train_step, which does "
                "so, or nonfinite='skip'."
            )
        return pipeline.shards(warn=False)

    def _loss_scale(self) -> jax.Array | None:
        """The current scale of the loss; ``None`` without one."""
        stage, state = self._pipeline.loss_scale, self.slots.tree
        if stage is None:
            return None
        return stage.init(None).scale if state is None else state.loss_scale.scale.get_value()

    def _origin(self, variables: list[AnyVariable]) -> GradientStatus | None:
        """What the gradients of variables are, if nobody has declared it."""
        shards = self._pipeline.shards(warn=False)
        divisor = self._pipeline.divisor(shards.size)
        declared = self._pipeline.incoming is not None
        return self.computed.origin(variables, shards.number, divisor, declared=declared)

    def _make_missing_slots(self, keyed: Mapping[str, AnyVariable]) -> None:
        def make(missing: Mapping[str, AnyVariable]) -> None:
            with explained(self._transformation.of_optax, when_made=True):
                made = self.slots.initial(self._pipeline.init, missing)
            self.slots.add(missing, made)

        make_missing_slots(self, keyed, make, self._made_in)


register_node(CrossShardOptimizer)


def transformation_of(optimizer: Any) -> Transformation:
    """What an optimizer does; of one of Optax's, what it does when it is wrapped.

    Raises:
      ArgumentTypeError: it is no optimizer.
    """
    if isinstance(optimizer, CrossShardOptimizer):
        return optimizer._transformation
    inner = check_transformation(optimizer)
    pipeline = Pipeline(optax.with_extra_args_support(inner), Reduction.MEAN)
    return Transformation(pipeline, WeightUpdate.REPLICATED, "CrossShardOptimizer", inner)


def pipeline_of(optimizer: Transformation, options: Mapping[str, Any]) -> Pipeline:
    """The pipeline of an optimizer, with further options.

    Raises:
      ArgumentError: an option is invalid, or the optimizer has it already.
      ArgumentTypeError: an option is invalid.
    """
    pipeline = optimizer.pipeline
    if not options:
        return pipeline
    # Which checks them first.
    given = dataclasses.replace(pipeline, options=options).options
    asked = {name: value for name, value in given.items() if _is_asked(value)}
    sums = ("reduce_dtype", "aggregator")
    for name in asked:
        both = sums if name in sums else (name,)
        if any(_is_asked(pipeline.options.get(each)) for each in both):
            raise ArgumentError(
                f"Both the optimizer and make_train_step were given {', or '.join(both)}. Pass it "
                f"to one of them."
            )
    return pipeline.with_options(**asked)


def _is_asked(value: Any) -> bool:
    return value is not None and not (isinstance(value, Sized) and len(value) == 0)


def _refuse_nested(inner: Any) -> None:
    """Raise NestedReductionError if an optimizer is a CrossShardOptimizer."""
    if isinstance(inner, CrossShardOptimizer):
        raise NestedReductionError(
            f"{inner!r} already reduces over the shards; wrapping it again would reduce twice. "
            f"Wrap its .inner."
        )
