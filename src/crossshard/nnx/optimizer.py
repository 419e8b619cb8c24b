"""CrossShardOptimizer: an Optax optimizer whose gradients are reduced over the shards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeAlias, Unpack, final

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from crossshard import _check, _flax, _jax, _mesh
from crossshard._annotations import Groups, PyTree
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.collectives.sums import widen
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    VariableError,
    WeightUpdateError,
)
from crossshard.gradients.local import value_and_grad
from crossshard.gradients.mean import Mean, part_of_shard
from crossshard.gradients.status import GradientStatus, Reduction, check_incoming
from crossshard.model.model_state import unless_weightless
from crossshard.nnx.per_shard import is_per_shard, number_of_shards, per_shard, stacked
from crossshard.nnx.program import (
    Given,
    MissingSlots,
    bound,
    roots_of_step,
    type_of,
    written,
)
from crossshard.nnx.slots import (
    HasSlots,
    SlotStore,
    as_params,
    check_global_step,
    check_pairs,
    is_variable,
    known_names,
    named_variables,
)
from crossshard.optimizer.transformation import Transformation
from crossshard.pipeline.pipeline import Options, Pipeline, check_names
from crossshard.pipeline.stage import CrossShardState, Gradients, Stage, StageContext
from crossshard.pipeline.stages.accumulate import AccumulateState
from crossshard.pipeline.stages.nonfinite import are_finite, is_sound, new_nans
from crossshard.pipeline.update.plan import WeightUpdate
from crossshard.shards.axes import Shards
from crossshard.shards.devices import on_every_device

GradientsAndVariables: TypeAlias = "Iterable[tuple[jax.Array | None, AnyVariable]]"
# States with a count of calls that decides which of them update.
_COUNTS_CALLS = (
    AccumulateState,
    optax.MultiStepsState,
    optax.ApplyEvery,
    optax.contrib.GaLoreState,
    optax.contrib.SAMState,
    optax.contrib.SophiaState,
)
VariableList: TypeAlias = "nnx.Pytree | AnyVariable | Sequence[nnx.Pytree | AnyVariable]"


@final
class CrossShardOptimizer(optax.GradientTransformationExtraArgs, HasSlots):
    """An optimizer that averages gradients across shards.

    It is an Optax transformation (``init``, ``update``), for ``optax.chain``, ``nnx.Optimizer``,
    Equinox or your own loop inside ``shard_map``, ``pmap`` or ``vmap(axis_name=…)``. Inside a
    runner, it also updates NNX variables in place, like
    ``tf.compat.v1.tpu.CrossShardOptimizer``. Both ways give the same parameters.

    ``update`` takes local gradients unless ``incoming`` declares otherwise: ``"summed"`` (over all
    shards, by autodiff), ``"reduced"`` (already reduced), ``"scaled"`` (divided by the number of
    shards, not summed). Under ``shard_map(check_vma=True)`` JAX's types show whether a gradient is
    summed; one that autodiff has summed raises unless declared. The extra argument ``value``, this
    shard's loss, is reduced like the gradients.

    Args:
      opt: an Optax transformation.
      reduction: ``Reduction.MEAN`` or ``Reduction.SUM``, or ``"mean"`` or ``"sum"``.
      name: the name of its scope in profiles and HLO.
      group_assignment: groups of shards, of equal size, each of which reduces independently; all
        shards if ``None``. The parameters of different groups diverge.
      preprocess: an Optax transformation, or a ``Stage``, that is applied to each shard's local
        gradient before it is reduced, such as ``optax.clip_by_global_norm(1.0)`` for clipping per
        shard. It has a state per shard; ``state_specs`` returns the specs.
      axis_name: the mesh axes of the shards; inferred from the bound axes if ``None``.
      incoming: the default of ``update``'s ``incoming``.
      weight_update: ``"replicated"``, or ``"sharded"``: each shard updates its slice of the
        parameters and has its slice of the optimizer state (ZeRO-1). In the Optax idiom the
        optimizer must be elementwise, and ``state_specs`` returns the specs of the state;
        ``make_train_step`` shards any optimizer.
      **options: stages to add: ``accumulate_steps``, ``metrics``, ``reduce_dtype``,
        ``aggregator``, ``loss_scale``, ``master_dtype``, ``ema``, ``nonfinite``; see
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
        given = {"preprocess": preprocess, **options}
        transformation = Transformation.checked(
            opt, reduction, name, group_assignment, axis_name, incoming, weight_update, given
        )
        made_in = None
        if "flax" in sys.modules:  # Flax must know this class as a node before it sees an instance
            _flax.load()
            made_in = _flax.current_trace()
        return cls._create(transformation, SlotStore(), made_in)

    @classmethod
    def _create(cls, transformation: Transformation, slots: SlotStore, made_in: Any = None) -> Self:
        """Create an optimizer; ``made_in`` is ``None`` if it is rebuilt, or Flax is not loaded."""
        self = super().__new__(cls, transformation.init, transformation.update)
        self._transformation = transformation
        self._made_in = made_in
        self.slots = slots
        self.forget()
        return self

    def __init_subclass__(cls) -> NoReturn:
        raise ArgumentTypeError(
            "CrossShardOptimizer has no subclasses. Write what is to happen to the reduced "
            "gradients as an Optax transformation and wrap that, optax.chain(yours, optax.adam("
            "1e-3)); what is to happen to each shard's own is preprocess=."
        )

    # By identity, not as a tuple, which Optax's transformations are.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        return repr(self._transformation)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy has slots of its own, and binds its own variables on first use.
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
        """Return the name given at construction."""
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
        """``"replicated"``, each shard updates all parameters, or ``"sharded"``, only its slice."""
        return self._transformation.weight_update

    def state_specs(
        self, params: PyTree, num_shards: int, axis_name: str | tuple[str, ...] | None = None
    ) -> CrossShardState:
        """Return the specs of the state, for ``in_specs`` and ``out_specs`` of ``jax.shard_map``.

        Args:
          params: the parameters, or their shapes and dtypes.
          num_shards: the number of shards.
          axis_name: the shard axes. If ``None``, those of the optimizer. If it has none either,
            ``"shards"``, or all axes of the mesh of ``params`` or of ``jax.set_mesh``.

        Returns:
          A ``PartitionSpec`` per array of the state.

        Raises:
          AxisError: the mesh has no axis ``"shards"``, and not ``num_shards`` devices.
          WeightUpdateError: ``weight_update="sharded"`` with an optimizer that is not elementwise.
          ArgumentError: a scalar parameter, with groups that each have their own.

        >>> import jax.numpy as jnp, optax
        >>> from jax.sharding import PartitionSpec
        >>> opt = CrossShardOptimizer(optax.trace(0.9), weight_update="sharded")
        >>> specs = opt.state_specs(jnp.zeros((64, 32)), num_shards=8)
        >>> specs.inner_state.trace == PartitionSpec("shards")
        True
        """
        return self._transformation.specs(params, num_shards, axis_name)

    def describe(self) -> str:
        """Return the stages of the pipeline in one line.

        >>> import optax
        >>> CrossShardOptimizer(optax.sgd(0.1), "sum").describe()
        'local gradient → sum over all shards → update'
        """
        return self._transformation.describe()

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
        """Return the gradients of a loss with respect to variables, before any reduction.

        Under MEAN the loss is divided by the number of shards that reduce together. Gradients of
        16-bit variables have 32 bits if they are divided.

        Args:
          loss: a function without arguments that returns a floating scalar. It may also write to
            variables, such as batch statistics, if they were given to the step, or are below
            ``var_list``. What it writes to a variable that it is differentiated by, as
            ``nnx.WeightNorm`` does, must be the same on all shards that reduce together.
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
          VariableError: a variable that is not floating, or a duplicate; the loss writes to one
            that was not given, or to one of ``var_list`` what differs between shards.
          VariableTypeError: an item of ``var_list`` is not a variable.
        """
        del aggregation_method, colocate_gradients_with_ops
        # The type comes first: a bool is refused, and an array would be compared elementwise.
        if type(gate_gradients) is not int or gate_gradients not in (0, 1, 2):
            raise ArgumentError(
                f"gate_gradients must be one of CrossShardOptimizer.GATE_NONE (0), GATE_OP (1) and "
                f"GATE_GRAPH (2); got {_check.shown(gate_gradients)}."
            )
        if not callable(loss):
            raise ArgumentTypeError(
                f"A loss must be a function without arguments, because a computed value cannot be "
                f"differentiated; got {type(loss).__name__}. Write lambda: loss_fn(model, x)."
            )
        shards = self._pipeline.shards()
        divisor, around = self._pipeline.divisor(shards.group_size), bound()
        if var_list is None:
            if around is None:
                raise ArgumentError(
                    "Outside of a step of crossshard.shard there is no list of all parameters. "
                    "Pass the module whose parameters to train, var_list=model."
                )
            var_list = [v for v in around.variables if isinstance(v, nnx.Param)]
        found = named_variables(var_list, roots_of_step())
        variables = [variable for variable, _ in found.values()]
        below = Given([roots_of_step(), var_list])
        # A layer may write to what it is trained with, too, as nnx.WeightNorm does.
        bound_here = [*variables, *(v for v in below.variables if id(v) not in found)]
        before = [variable.get_raw_value() for variable in bound_here]
        values, of_others = before[: len(variables)], before[len(variables) :]
        reached: set[int] = set()

        def of_values(values: list[Any]) -> Any:
            given = [_mark(value, place, reached) for place, value in enumerate(values)] + of_others
            with _flax.rebound(bound_here, given, below.modules):
                out = loss()
                after = [variable.get_raw_value() for variable in bound_here]
                below.check_nothing_new()
            empty = None
            is_mean.append(isinstance(out, Mean))
            if isinstance(out, Mean):
                out, empty = part_of_shard(out, self._shards_of_mean())
            value = jnp.asarray(_check.scalar(out))
            divided = value if divisor == 1 or divide_after else value / divisor
            return divided, (value, written(given, after), empty)

        # In 16 bits, a small gradient that is divided could underflow before it is summed.
        divide_after = divisor > 1 and any(jnp.finfo(value.dtype).bits < 32 for value in values)
        names, scale = self._pipeline.axis_name or None, self._loss_scale()
        is_mean = list[bool]()
        of_shard = value_and_grad(of_values, has_aux=True, axis_name=names, loss_scale=scale)
        (_, (value, kept, empty)), gradients = of_shard(values)
        if divide_after:
            gradients = [widen(gradient) / divisor for gradient in gradients]
        if grad_loss is not None:
            # grad_loss may be an int; a loss may not.
            seed = jnp.asarray(_check.scalar(grad_loss, "grad_loss", (jnp.floating, jnp.integer)))
            _check.finite("grad_loss", grad_loss)
            gradients = [gradient * seed.astype(gradient.dtype) for gradient in gradients]
        if self._pipeline.nonfinite is not None or self._pipeline.loss_scale is not None:
            found_here = Gradients(gradients, {"value": value})
            sound = are_finite(found_here) & is_sound(found_here)
            one = lambda new: any(map(shards.invariant_axes, jax.tree.leaves(new)))
            own = map(around.is_own, bound_here) if around else (not one(new) for new in kept)
            # One value for all shards must stay one, whatever this shard has found.
            keep = [sound if each else True for each in own]
            kept = list(map(_unless_not_finite, keep, kept, before))
        for variable, new in zip(bound_here, kept, strict=True):
            for value_after in new:
                variable.set_raw_value(value_after)
        trained = [v for v, new in zip(variables, kept, strict=False) if new]
        if trained and shards.group_size > 1 and not self._pipeline.over_all_shards:
            raise VariableError(
                f"The loss writes to {describe_variable(trained[0])}, which the optimizer trains "
                f"in groups of shards, and nothing shows that all of a group write the same. Write "
                f"to a variable that is no nnx.Param; or bound it in the optimizer, as "
                f"optax.keep_params_nonnegative does."
            )
        if around is not None and self._pipeline.over_all_shards:
            around.written_by_loss += trained
        weight = None if empty is None else jnp.where(empty, 0.0, 1.0)
        self.computed.note(found, shards.num_shards, value, weight)
        self.computed.are_means += is_mean
        of_each = enumerate(zip(gradients, variables, strict=True))
        return [(g if place in reached else None, v) for place, (g, v) in of_each]

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: AnyVariable | None = None,
        name: str | None = None,
        *,
        incoming: str | None = None,
        value: ArrayLike | None = None,
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
            ``"reduced"``. Without it, any gradients of variables whose own it has returned in this
            step are taken for these, clipped or added up: of others declare it.
          value: float[], this shard's loss, for inner optimizers that read it.

        Raises:
          ArgumentError, ArgumentTypeError: no pairs, no gradients, or an item that is not a pair;
            an optimizer whose state cannot be slots.
          VariableError: a duplicate variable, a variable with another shape than its gradient, or
            one that was not given to the step.
          IncomingError: under MEAN, the gradient of a variable of which ``compute_gradients``
            returned none in this step, or one that was applied already, without ``incoming``.
          ShardContextError: gradients that were computed with another number of shards.
        """
        self._check_replicated()
        pairs = check_pairs(grads_and_vars)
        check_global_step(global_step)
        scope = (
            contextlib.nullcontext() if name is None else jax.named_scope(_check.word("name", name))
        )
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        variables = [variable for _, variable in given]
        shards, declared = self._pipeline.shards(warn=False), self._pipeline.incoming is not None
        origin = check_incoming(incoming) or self.computed.origin(
            variables,
            shards.num_shards,
            self._pipeline.divisor(shards.group_size),
            declared=declared,
        )
        if origin is not GradientStatus.REDUCED:
            self._check_one_model(variables, shards.num_shards)
        # A shard of which no row counts in a ``Mean``; if that is so on all, nothing changes.
        is_own = incoming is None and origin is GradientStatus.SCALED
        weight = self.computed.weight_of(variables) if is_own else None
        keyed = self._keyed(pairs)
        self._check_together(keyed)
        self._make_slots(keyed)
        if keyed.keys() != self.slots.variables.keys():
            self.slots.check_shared(self._pipeline.init, keyed)
        gradients = {key: jnp.asarray(g) for key, (g, _) in zip(keyed, given, strict=True)}
        params, before = as_params(keyed), self.slots.values(keyed)
        extra_args = {} if value is None else {"value": value}
        with scope:
            updates, after, reduced = self._transformation.update_local(
                gradients, before, params, origin, weight, extra_args
            )
            stepped = optax.apply_updates(params, updates)
        if jax.tree.structure(after) != jax.tree.structure(before):
            raise ArgumentError(
                f"The state of {self._transformation.of_optax} changed its structure in a step, "
                f"from {jax.tree.structure(before)} to {jax.tree.structure(after)}. Slots keep "
                f"theirs; use the Optax idiom (init and update)."
            )
        for key, variable in keyed.items():
            variable.set_value(stepped[key])
        self.slots.write(keyed, after)
        if global_step is not None:
            count, skip = global_step.get_value(), reduced.skip
            skip = None if skip is None else StageContext(shards).on_all_shards(skip)
            global_step.set_value(count + 1 if skip is None else jnp.where(skip, count, count + 1))
        self.computed.note_applied(variables)

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
    ) -> jax.Array:
        """Call ``compute_gradients`` and ``apply_gradients``; return this shard's unscaled loss.

        The loss is also passed to inner optimizers that read ``value=``. For arguments and errors
        see the two methods.
        """
        del aggregation_method, colocate_gradients_with_ops
        pairs = self.compute_gradients(loss, var_list, gate_gradients, grad_loss=grad_loss)
        loss_of_shard = self.computed.value
        # Passed only if it is read, since it would be summed over the shards in any case.
        is_read = self._transformation.reads_value(loss_of_shard, as_params(self._keyed(pairs)))
        value = loss_of_shard if is_read else None
        self.apply_gradients(pairs, global_step, name, value=value)
        return loss_of_shard

    def build(self, var_list: VariableList) -> None:
        """Create the slots of these variables now instead of at the first step.

        Args:
          var_list: an NNX module, or a list of variables.

        Raises:
          ArgumentError: the inner optimizer's state cannot be slots.
          VariableError, VariableTypeError: see ``compute_gradients``.
        """
        self._check_replicated()
        found = named_variables(var_list, roots_of_step())
        variables = [variable for variable, _ in found.values()]
        self._make_slots(self.slots.keyed(variables, found, roots_of_step()))

    def get_slot(self, var: AnyVariable, name: str) -> AnyVariable | None:
        """Return the slot of a variable, as a variable; ``None`` if there is no such slot.

        ``name`` is a field of the Optax state (``mu``, ``nu``, ``trace``, ``sum_of_squares`` …) or
        TensorFlow's name (``m``, ``v``, ``momentum``, ``accumulator`` …).

        Raises:
          ArgumentTypeError: ``var`` is not a variable, or ``name`` is not a name.
        """
        if not isinstance(var, nnx.Variable):
            raise ArgumentTypeError(f"var must be an nnx variable; got {_check.described(var)}.")
        return self.slots.find(var, _check.word("name", name, "It is that of a slot, such as 'm'."))

    def get_slot_names(self) -> list[str]:
        """Return Optax's names of the slots; empty before the first step."""
        return list(self.slots.named())

    def variables(self) -> list[AnyVariable]:
        """Return every variable of the state: slots and shared ones, such as a step count."""
        return self.slots.all()

    @property
    def loss(self) -> jax.Array | None:
        """This shard's loss that ``compute_gradients`` took last in this step; else ``None``.

        A float[], not divided by the number of shards. To call the loss once more would also
        update batch statistics and draw random numbers once more.
        """
        return self.computed.value

    @property
    def state(self) -> CrossShardState | None:
        """The Optax state with a variable at every leaf; ``None`` before the first step.

        It is the optimizer's own, as ``opt_state`` of ``nnx.Optimizer``: writing to a variable
        changes the next step, ``opt.state.inner_state.hyperparams["learning_rate"][...] = 0.01``.
        """
        state: CrossShardState | None = self.slots.tree
        return state

    # Shared by the methods, and called by runners.

    def _share_out(self, number: int) -> bool:
        """Give what other shards hold back to so many; return whether there was anything."""
        sizes = filter(None, map(number_of_shards, self._held_back()))
        old, tree = next(sizes, number), self.slots.tree
        if old == number:
            return False
        variables, structure = jax.tree.flatten(tree.aggregate, is_leaf=is_variable)
        values = [jnp.asarray(stacked(variable.get_raw_value())) for variable in variables]

        def moved(values: list[Any]) -> Any:
            pairs = zip(variables, values, strict=True)
            rows = [x if is_per_shard(v) else jnp.stack([x] * old) for v, x in pairs]
            return self._pipeline.aggregator.on_other_shards(structure.unflatten(rows), number)

        found = _mesh.of_rows(moved, list(map(on_every_device, values)))
        for variable, rows in zip(variables, jax.tree.leaves(found), strict=True):
            if is_per_shard(variable):
                variable.set_raw_value(per_shard(rows))
        return True

    def _check_replicated(self) -> None:
        """Raise WeightUpdateError if each shard updates its slice, since slots are not sharded."""
        if self._transformation.weight_update is WeightUpdate.SHARDED:
            raise WeightUpdateError(
                "weight_update='sharded' is for the Optax idiom and make_train_step: a slot has "
                "the full shape of its variable. Leave weight_update out here."
            )

    @property
    def _shards_of_mean(self) -> Callable[[], Shards]:
        return self._transformation.shards_of_mean  # also read by crossshard.value_and_grad

    def _loss_scale(self) -> jax.Array | None:
        """Return the current scale of the loss; ``None`` if there is none."""
        stage, state = self._pipeline.loss_scale, self.slots.tree
        if stage is None:
            return None
        return stage.init(None).scale if state is None else state.loss_scale.scale.get_value()

    def _keyed(self, pairs: Sequence[tuple[Any, AnyVariable]]) -> dict[str, AnyVariable]:
        """Return the variables that have a gradient by key; a place stands for a missing name."""
        by_place = {id(v): (v, f"#{place}") for place, (_, v) in enumerate(pairs)}
        variables = [variable for gradient, variable in pairs if gradient is not None]
        roots = roots_of_step()
        names = by_place | known_names(variables, roots) | self.computed.names
        return self.slots.keyed(variables, names, roots)

    def _check_one_model(self, variables: Sequence[AnyVariable], number: int) -> None:
        """Raise if shards that share their gradients have variables of their own."""
        around = bound()
        if around is None or number == 1 or not self._pipeline.over_all_shards:
            return
        for variable in filter(around.still_is_own, variables):
            raise VariableError(
                f"{describe_variable(variable)} differs between shards, and this optimizer reduces "
                f"over all {number}: the gradients would be those of different models. Each "
                f"shard's own gradients leave it so where they are declared incoming='summed' or "
                f"'reduced': write 'local'. So do groups: pass the group_assignment= that they are "
                f"of. Or train one of these models, crossshard.merge_shards(model, shard=0)."
            )

    def _check_together(self, keyed: Mapping[str, AnyVariable]) -> None:
        """Raise if calls are counted, and are not of all variables that have slots."""
        counts = lambda node: isinstance(node, _COUNTS_CALLS)
        known, nodes = sorted(self.slots.variables), jax.tree.leaves(self.slots.tree, counts)
        if sorted(keyed) != known and any(map(counts, nodes)):
            raise ArgumentError(
                f"An optimizer that accumulates, as with accumulate_steps=, or does something in "
                f"every k-th call, as optax.contrib.sam, counts the calls of all its variables "
                f"together: this call has gradients of {', '.join(sorted(keyed))}, and there are "
                f"slots of {', '.join(known)}. Write one optimizer for each set of variables, and "
                f"build it with these alone."
            )

    def _make_slots(self, keyed: Mapping[str, AnyVariable]) -> None:
        """Make the slots of those variables that have none; raise where they would be lost."""
        missing = self.slots.bind(keyed)
        self.slots.check_shapes(self._pipeline.init, keyed)
        if not missing:
            return

        around, made_in, roots = bound(), self._made_in, roots_of_step()
        make = lambda: self.slots.make(self._pipeline.init, missing, roots)
        needed: list[AnyVariable | HasSlots] = [*missing.values(), self]
        given = [around is not None and around.has(each) for each in needed]
        if around is not None and all(given):
            raise MissingSlots(make)
        if any(given):
            words = ["given to it" if each else "not given to it" for each in given]
            first = " If it is a module's attribute, import Flax before you create it."
            raise VariableError(
                f"An optimizer and its variables must be either both passed to a step or both "
                f"created in it: {self!r} was {words[-1]}, and "
                f"{describe_variable(next(iter(missing.values())))} was {words[0]}. Pass both as "
                f"arguments.{first if made_in is None else ''}"
            )
        if not (_jax.at_top_level() if made_in is None else made_in == _flax.current_trace()):
            raise VariableError(
                f"The slots of {self!r} would be created inside a trace, as of nnx.jit, and be "
                f"lost when it ends. Create them before it with optimizer.build(model)."
            )
        make()


def _flatten(optimizer: CrossShardOptimizer) -> tuple[Any, Any]:
    # Equal for an optimizer and its rebuilt copies.
    slots = optimizer.slots
    static = optimizer._transformation, tuple(slots.variables), tuple(slots.paths.items())
    return ((jax.tree_util.GetAttrKey("state"), slots.tree),), static


def _unflatten(static: Any, children: Any) -> CrossShardOptimizer:
    transformation, keys, paths = static
    slots = SlotStore(dict.fromkeys(keys), dict(paths), *children)
    return CrossShardOptimizer._create(transformation, slots)


# As with nnx.Optimizer, its children in JAX's trees and NNX's graphs are its slots.
jax.tree_util.register_pytree_with_keys(CrossShardOptimizer, _flatten, _unflatten)
_flax.when_loaded(lambda: nnx.register_data_type(CrossShardOptimizer))


def _unless_not_finite(sound: Any, written: list[Any], before: Any) -> list[Any]:
    """Return what a loss wrote, with floating values as before unless ``sound`` and without NaN."""

    def one(after: Any) -> Any:
        if type_of(after) != type_of(before):
            return after
        nans = jax.tree.leaves(new_nans(after, before))
        return unless_weightless(sound & ~jnp.stack(nans).any(), after, before)

    return list(map(one, written))


def _mark(value: jax.Array, place: int, reached: set[int]) -> jax.Array:
    """Return the value; when a gradient flows back, ``place`` is added to ``reached``."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        # Autodiff only calls this if the loss depends on the value.
        reached.add(place)
        return (gradient,)

    identity.defvjp(lambda x: (x, None), backward)
    return identity(value)
