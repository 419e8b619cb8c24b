"""Pipeline: the stages from a local gradient to the update, in their order.

The Optax transformation, the stateful optimizer and the whole step each build a ``Pipeline`` and
run its stages.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypedDict, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from crossshard import _check
from crossshard._annotations import Given, PyTree
from crossshard.collectives.few_bits import Quantized
from crossshard.collectives.sums import sum_over_shards
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.status import (
    GradientStatus,
    Reduction,
    Statuses,
    refuse_nesting,
    statuses_of,
)
from crossshard.pipeline.aggregator import Aggregator, Plain, check_like, check_pair
from crossshard.pipeline.stage import (
    CrossShardState,
    Gradients,
    Phase,
    Stage,
    StageContext,
    Staged,
    Updated,
    as_local,
)
from crossshard.pipeline.stages.accumulate import Accumulate
from crossshard.pipeline.stages.aggregate import Aggregate, Weigh
from crossshard.pipeline.stages.few_bits import FewBits
from crossshard.pipeline.stages.local_sgd import LocalSGD
from crossshard.pipeline.stages.loss_scale import DynamicLossScale
from crossshard.pipeline.stages.metrics import LocalNorms, Metrics
from crossshard.pipeline.stages.nonfinite import (
    REPORTED,
    Nonfinite,
    ReportNonfinite,
    Rerun,
    are_finite,
    as_counted,
    as_one_report,
    if_not_finite,
    is_sound,
    rerun_if_not_finite,
    with_finite,
)
from crossshard.pipeline.stages.preprocess import Preprocess
from crossshard.pipeline.update.optimize import Optimize
from crossshard.shards.axes import GroupAssignment, Shards, current_shards

# The stages in the order in which they run, which is also that of their phases. To add a stage, add
# it here: ``from_options`` makes it, and its class says how its state is stored and resharded.
STAGES: tuple[type[Stage], ...] = (
    Accumulate,
    ReportNonfinite,
    Preprocess,
    LocalNorms,
    Weigh,
    Aggregate,
    DynamicLossScale,
    Nonfinite,
    Optimize,
    Metrics,
    LocalSGD,
)


class Options(TypedDict, total=False):
    """The options that ``CrossShardOptimizer`` and ``make_train_step`` share.

    Keys:
      accumulate_steps: the number of microbatches whose mean gradient is reduced once, for one
        update. In ``make_train_step`` each shard's rows are split into them and computed one after
        the other, with the model state before the step and random keys of their own. In an
        optimizer they are calls of ``update``; all but the last of them send only a count, and
        return zeros.
      metrics: names of further metrics of each update: ``"grad_norm"``, ``"local_grad_norm"``,
        ``"update_norm"``, ``"param_norm"``, ``"learning_rate"``, ``"noise_scale"``,
        ``"noise_variance"``, ``"noise_signal"``. A step returns them; an optimizer's state holds
        them in ``state.metrics``.
      reduce_dtype: the dtype in which gradients are sent: ``bfloat16`` halves the bytes, ``int8``
        and ``float8_e4m3fn`` take a quarter of them, ``int4`` an eighth, with error feedback; see
        ``Quantized`` for other ways. CPUs add them in float32; GPUs and TPUs add ``bfloat16`` in
        bfloat16. With several shard axes it may be a dict from axis to dtype,
        ``{"host": "int8"}``: the sum is taken along the last axis first, and axes that are left
        out have float32.
      aggregator: an ``Aggregator`` of your own, which sums the gradients over the shards in place
        of XLA.
      loss_scale: ``"dynamic"``, or a ``DynamicLossScale``: updates that are not finite are skipped.
        ``make_train_step`` and ``compute_gradients`` scale the loss themselves; for ``update``
        pass ``loss_scale=state.loss_scale`` to ``crossshard.value_and_grad``.
      master_dtype: ``float32``: the state also holds the parameters in this dtype, and 16-bit
        parameters are rounded from these masters. A parameter that you set between two updates
        becomes its master.
      ema: the decay of a moving average of the parameters, such as 0.999, or a schedule, a
        function of the number of updates so far. ``step.model(state, ema=True)``, or
        ``optax.tree.get(state, "ema")``.
      nonfinite: what to do about a gradient that is NaN or infinite: ``"quarantine"`` leaves the
        shard out of the mean, ``"skip"`` leaves parameters and state as they were, on all shards,
        and ``"raise"``, in ``make_train_step`` alone, ends the run. ``metrics["nonfinite"]``, or
        ``state.nonfinite``, names the shard and the leaf. See ``Nonfinite``.

    >>> from crossshard import CrossShardOptimizer
    >>> import optax
    >>> options = Options(reduce_dtype="bfloat16", nonfinite="skip")
    >>> CrossShardOptimizer(optax.sgd(0.1), **options).describe()
    'local gradient → mean over all shards in bfloat16 → skip if not finite → update'
    """

    accumulate_steps: int
    metrics: str | Iterable[str]
    reduce_dtype: DTypeLike | Quantized | Mapping[str, DTypeLike | Quantized | None] | None
    aggregator: Aggregator | None
    loss_scale: str | DynamicLossScale | None
    master_dtype: DTypeLike | None
    ema: float | Callable[[jax.Array], ArrayLike] | None
    nonfinite: str | Nonfinite | None


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """From local gradients to updated parameters."""

    inner: optax.GradientTransformationExtraArgs  # the inner optimizer, as the user passed it
    reduction: Reduction  # MEAN or SUM, the reduction of the aggregate
    # The groups that reduce independently; ``None`` for all shards.
    groups: GroupAssignment | None = None
    # The mesh axes of the shards; empty to infer them at trace time.
    axis_name: tuple[str, ...] = ()
    # The status of incoming gradients; ``None`` to read it from their types.
    incoming: GradientStatus | None = None
    # The options from which the stages are made, by name, as the user passed them. An option may
    # have no hash, such as a dict of dtypes.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # Some iterables can be read only once, and each copy of a pipeline reads them again.
        again = lambda x: tuple(x) if isinstance(x, Iterator) else x
        options = {name: again(value) for name, value in self.options.items()}
        object.__setattr__(self, "options", options)
        _ = self.stages  # making them checks the options

    @functools.cached_property
    def _by_kind(self) -> dict[type[Stage], Stage]:
        """The stages by class; ``Preprocess.from_options`` returns the user's own stage."""
        names = "inner", "reduction", "groups", "axis_name"
        options = {**{name: getattr(self, name) for name in names}, **self.options}
        # A stage that no option asks for is not made.
        by = {k: k.options if k.asked_by is None else k.asked_by for k in STAGES}
        asked = [k for k in STAGES if not by[k] or not options.keys().isdisjoint(by[k])]
        made = {kind: kind.from_options(options) for kind in asked}
        return {kind: stage for kind, stage in made.items() if stage is not None}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the order in which they run."""
        return tuple(self._by_kind.values())

    def with_workers(self, number: int) -> Self:
        """Return the pipeline with each of ``number`` shards as a group, if it has no groups."""
        alone = GroupAssignment(tuple((shard,) for shard in range(number)))
        return dataclasses.replace(self, groups=self.groups or alone)

    def with_options(self, **options: Any) -> Self:
        """Return the pipeline with other values of these options."""
        return dataclasses.replace(self, options={**self.options, **options})

    def without(self, is_dropped: Callable[[type[Stage]], bool]) -> Self:
        """Return the pipeline without the kinds of stages for which ``is_dropped`` is true."""
        dropped = {name for kind in STAGES if is_dropped(kind) for name in kind.options}
        kept = {name: value for name, value in self.options.items() if name not in dropped}
        return dataclasses.replace(self, options=kept)

    # The stages that the rest of the package asks for, and their options.

    @property
    def accumulate(self) -> Accumulate | None:
        """The stage that sums the gradients of several calls; ``None`` to update at each."""
        return cast(Accumulate | None, self._by_kind.get(Accumulate))

    @property
    def preprocess(self) -> Stage | None:
        """The stage on local gradients; ``None`` without one."""
        return self._by_kind.get(Preprocess)

    @property
    def loss_scale(self) -> DynamicLossScale | None:
        """The stage that skips steps that overflow; ``None`` without one."""
        return cast(DynamicLossScale | None, self._by_kind.get(DynamicLossScale))

    @property
    def nonfinite(self) -> Nonfinite | None:
        """The stage that keeps out gradients that are not finite; ``None`` without one."""
        return cast(Nonfinite | None, self._by_kind.get(Nonfinite))

    @property
    def optimize(self) -> Optimize:
        """The stage that runs the optimizer."""
        return cast(Optimize, self._by_kind[Optimize])

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer, with a moving average and master weights if asked for."""
        return self.optimize.optimizer

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics of each update."""
        stage = cast(Metrics | None, self._by_kind.get(Metrics))
        return () if stage is None else stage.names

    @property
    def aggregator(self) -> Aggregator:
        """The aggregator, which sums the gradients."""
        return cast(Aggregate, self._by_kind[Aggregate]).aggregator

    @property
    def reduce_dtype(self) -> Any:
        """The dtype in which XLA sends gradients; ``None`` for their own, or float32."""
        return self.aggregator.dtype if isinstance(self.aggregator, Plain) else None

    @property
    def joins_groups(self) -> bool:
        """Whether a stage synchronises the parameters of all groups, which are workers."""
        return any(stage.joins_groups for stage in self.stages)

    # The states of the stages.

    @functools.cached_property
    def _stateful(self) -> dict[str, Stage]:
        """The stages with a state, by its name."""
        return {stage.state_field: stage for stage in self.stages if stage.state_field}

    def init(self, params: Any) -> CrossShardState:
        """Return one shard's state of every stage before the first step."""
        made = {name: stage.init(params) for name, stage in self._stateful.items()}
        for name, state in made.items():
            # JAX keeps arrays from one step to the next, and nothing else.
            _check.arrays(f"The state of {name}", state, or_types=True)
        return CrossShardState().with_states(**made)

    def placements(self, state: CrossShardState, inner: Any = ()) -> CrossShardState:
        """Return the placement of each array of a state, given those of the inner optimizer."""
        found = {name: s.placements(state.of(name)) for name, s in self._stateful.items()}
        return CrossShardState().with_states(**{**found, "inner_state": inner})

    def moved_to(
        self, state: CrossShardState, spread: CrossShardState, number: int
    ) -> CrossShardState:
        """Return the states on another number of shards; see ``Stage.moved_to``."""
        moved = {}
        for name, stage in self._stateful.items():
            moved[name] = stage.moved_to(state.of(name), spread.of(name), number)
            if stage.phase is Phase.REDUCTION and self.joins_groups:
                # A residual belongs to the mean of its old group, which no longer exists.
                drop = lambda x: x * 0 if jnp.issubdtype(x.dtype, jnp.inexact) else x
                moved[name] = jax.tree.map(drop, moved[name])
        return spread.with_states(**moved)

    def follows_params(self, state: CrossShardState) -> CrossShardState:
        """Return for each array of a state whether it is made anew for other parameters."""
        found = {name: s.follows_params(state.of(name)) for name, s in self._stateful.items()}
        return CrossShardState().with_states(**found)

    def check_shapes(self, state: CrossShardState, types: CrossShardState) -> None:
        """Raise unless the stages can go on from this state, given the types of one shard's."""
        state, types = (each._replace(inner_state=()) for each in (state, types))
        leaves = zip(*map(jax.tree.leaves, (self.placements(state), state, types)), strict=True)
        # An array that is yet to be made has no shape.
        known = ((x, own.per_shard, like) for own, x, like in leaves if hasattr(x, "shape"))
        if any(x.shape[per_shard:] != like.shape for x, per_shard, like in known):
            raise ArgumentError(
                "A stage's state has arrays of other shapes. sync_streaming with another "
                "sync_every, for example, cuts them differently. Choose the parameters with "
                "other.model(state) and init with them."
            )

    def exported(self, state: CrossShardState, params: Any) -> Any:
        """Return the parameters of ``model(state)``, given those of the groups, ``[shards, …]``."""
        for name, stage in self._stateful.items():
            params = stage.exported(state.of(name), params)
        return params

    def written(self) -> dict[str, Given]:
        """Return the options that a checkpoint stores, by name; ``None`` for those that are off."""
        compared = [kind for kind in STAGES if kind.is_compared]
        found = dict.fromkeys(name for kind in compared for name in kind.options)
        for kind in compared:
            stage = self._by_kind.get(kind)
            if stage is not None:
                found |= {"preprocess": stage} if kind is Preprocess else stage.written()
        return found

    def describe(
        self,
        steps: Sequence[str] = ("update",),
        *,
        weighted: bool = False,
        params_sharded: bool = False,
        of_loss: str = "",
        microbatches: int = 1,
    ) -> str:
        """Describe the stages in one line, in the order in which they run.

        Args:
          steps: the update and what follows it.
          weighted: whether shards have weights.
          params_sharded: whether the parameters are sharded.
          of_loss: the gradient in words, if no shard has a loss of its own; else empty.
          microbatches: the number of microbatches in one program.
        """
        update, *gather = steps
        texts = [of_loss or f"{self.incoming or 'local'} gradient"]
        if params_sharded:
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
        # Two stages may print the same skip; print it once.
        return " → ".join(dict.fromkeys(filter(None, texts)))

    # Running the stages.

    def arrive(
        self,
        values: Any,
        shards: Shards,
        *,
        declared: GradientStatus | None = None,
        extra: Mapping[str, Any] | None = None,
        weight: jax.Array | None = None,
        params: Any = None,
        widened: bool = False,
        early: tuple[bool, ...] = (),
    ) -> Gradients:
        """Make ``Gradients``: find the status of each leaf, and the dtype of its reduced value.

        Args:
          values: a pytree of this shard's arrays.
          shards: the shards that reduce.
          declared: their declared status; ``None`` for the pipeline's, or to read it from types.
          extra: further values to reduce with them.
          weight: float[], the weight of this shard.
          params: the parameters, if they are known.
          widened: whether values are wider than their parameters, and get back their dtypes.
          early: for each leaf whether the backward pass has summed it; see ``Gradients``.

        Raises:
          DoubleReductionError, IncomingError, ArgumentTypeError: see ``statuses_of``.
        """
        declared, extra = declared or self.incoming, dict(extra or {})
        how: Any = {"reduction": self.reduction, "grouped": not self.over_all_shards}
        extra_status: Statuses = ()
        for name in sorted(extra):
            known = declared
            if name == "value" and declared in (None, GradientStatus.SCALED):
                # A loss is local, unless it is invariant.
                invariant = shards.has_vma and not shards.is_varying(extra[name])
                known = GradientStatus.REDUCED if invariant else GradientStatus.LOCAL
            extra_status += statuses_of({name: extra[name]}, shards, known, **how)
        early_of = early or (False,) * len(jax.tree.leaves(values))
        found = statuses_of(values, shards, declared, **how)
        pairs = zip(found, early_of, strict=True)
        status = tuple(GradientStatus.SUMMED if is_early else each for each, is_early in pairs)
        widened = widened or self.accumulate is not None
        master_dtype = self.optimize.master_dtype

        def dtype_of(leaf: Any, param: Any, status: GradientStatus | None, is_early: bool) -> Any:
            # compute_gradients divides in float32, and 16-bit parameters need 16-bit gradients.
            is_wide = is_early or widened or status is GradientStatus.SCALED
            dtype = jnp.result_type(param if is_wide else leaf)
            if master_dtype is not None and status is not None:
                dtype = jnp.promote_types(dtype, master_dtype)
            return dtype

        # The parameters of optax.lookahead have more leaves than the gradients.
        like = jax.tree.leaves(values if params is None else params)
        dtypes = map(dtype_of, jax.tree.leaves(values), like, status, early_of)
        dtypes_of_extra = map(jnp.result_type, jax.tree.leaves(extra))
        return Gradients(
            values,
            extra,
            weight,
            status=status,
            extra_status=extra_status,
            early=early,
            dtypes=(*dtypes_of_extra, *dtypes),
        )

    def update(self, gradients: Gradients, state: CrossShardState, context: StageContext) -> Staged:
        """Run all stages; return the reduced gradients with the update, and the next state.

        The gradients of a call that only accumulates have no values, and their step is skipped.
        """
        if self.accumulate is None:
            return self.finish(*self.reduce(gradients, state, context), state, context)
        gradients, after = self.run(Phase.CALL, gradients, state, context)
        sums = after.accumulate

        def last(state: CrossShardState) -> Any:
            done = self.reduce(gradients, state, context)
            reduced, after = self.finish(*done, state, context)
            skip = jnp.bool_(False) if reduced.skip is None else reduced.skip
            empty = jax.tree.map(jnp.zeros_like, sums)
            # The value is equal on all shards, but its type must be that of the carried state.
            shards = context.shards
            typed = lambda new, old: shards.as_varying(new) if shards.is_varying(old) else new
            found = jax.tree.map(typed, after.nonfinite, state.nonfinite)
            after = after._replace(accumulate=empty, nonfinite=found)
            assert reduced.updated is not None
            return self._as_varying(reduced.updated.result, after, skip, context)

        def wait(state: CrossShardState) -> Any:
            like = jax.eval_shape(last, state)[0]
            state, result = state._replace(accumulate=sums), jax.tree.map(jnp.zeros_like, like)
            return self._as_varying(result, state, jnp.bool_(True), context)

        result, state, skip = lax.cond(self.accumulate.is_last(sums), last, wait, state)
        return gradients.replace(values=None, skip=skip, updated=Updated(result)), state

    def _as_varying(
        self, result: Any, state: CrossShardState, skip: Any, context: StageContext
    ) -> tuple[Any, CrossShardState, Any]:
        """Return the results of a branch, with what may differ between groups cast to varying."""
        if self.over_all_shards:
            return result, state, skip
        parts = result, state.inner_state, state.metrics, skip
        result, inner_state, metrics, skip = jax.tree.map(context.shards.as_varying, parts)
        return result, state._replace(inner_state=inner_state, metrics=metrics), skip

    def reduce(
        self,
        gradients: Gradients,
        before: CrossShardState,
        context: StageContext,
        others: Callable[[jax.Array | None], dict[str, Any]] = lambda _: {},
        rerun: Callable[[Gradients, Any, Rerun], Staged] | None = None,
        inputs: Any = None,
    ) -> Staged:
        """Run the stages from ``ARRIVAL`` to the reduction.

        Args:
          gradients: the gradients of each shard.
          before: the state before these stages.
          context: the context.
          others: returns further arrays to sum, by name, given the weight of the shard.
          rerun: ``(gradients, inputs, how) → (gradients, before)``. Computes the gradients again
            after one that was not finite, and returns them with the state before these stages.
            ``None`` to keep the gradients of each shard until it is known whether they are needed.
          inputs: what ``rerun`` takes.
        """

        # Cast what is the same on all shards to varying if there are groups, whose results differ.
        typed = lambda x: x if self.over_all_shards else context.shards.as_varying(x)
        # Whether what follows may make a gradient finite that was not.
        may_hide = bool(self.of_own_gradient) or self.aggregator.may_hide_nonfinite
        # A loss scale has to know of overflows all the same.
        arrived = are_finite(gradients) if may_hide and self.loss_scale is not None else True

        def after_arrival(gradients: Gradients) -> Gradients:
            return self.run(Phase.ARRIVAL, gradients, before, context)[0]

        def after_local(gradients: Gradients, state: CrossShardState = before) -> Staged:
            sums = {**others(gradients.weight), **gradients.sums}
            return self.run(Phase.LOCAL, gradients.replace(sums=sums), state, context)

        def after_reduction(gradients: Gradients, state: CrossShardState) -> Any:
            reduced, state = self.run(Phase.REDUCTION, gradients, state, context)
            if self.nonfinite is None and self.loss_scale is None:
                return reduced, state
            sound = True if self.nonfinite is None else is_sound(gradients)
            return with_finite(reduced, context, sound & arrived), state

        if self.nonfinite is None or may_hide:
            return after_reduction(*after_local(after_arrival(gradients)))

        # If the reduced gradient is finite, so is each shard's own, and ARRIVAL, which checks it,
        # is left out. Else each shard still has its own, which is checked, and summed again; or
        # ``rerun`` computes it in two turns more: the first one reports, the second one sums.
        gradients = as_local(gradients, context, ReportNonfinite.needs_local)
        total = None
        if self.excludes_shards:
            if gradients.weight is None:
                # A constant instead of a sum, for which all gradients would wait.
                total = typed(jnp.asarray(context.shards.group_size, float))
            gradients = gradients.replace(weight=as_counted(gradients.weight))
        reduced, state = after_reduction(*after_local(gradients.replace(total_weight=total)))
        with jax.named_scope(self.nonfinite.scope):
            none = typed(jnp.zeros(context.shards.num_shards, jnp.float32))
            reduced = reduced.replace(sums={**reduced.sums, REPORTED: none})
            done = reduced, state.aggregate

            def reduced_again(
                gradients: Gradients, state: CrossShardState = before
            ) -> tuple[Gradients, Staged]:
                rest, after = after_local(gradients, state)
                found, after = after_reduction(rest, after)
                # The state of the aggregator must not come from gradients that are not finite.
                return rest, (found, after.aggregate)

            # Reduce again, without the shards whose gradients are not finite.
            def without_bad(_: Any, own: Any) -> tuple[Staged, Any]:
                rest, found = reduced_again(after_arrival(gradients.replace(values=own)))
                kept = lambda new, old: new if new.dtype == old.dtype else old
                return found, jax.tree.map(kept, rest.values, own)

            # Keep what was reduced, and find which shards are not finite.
            def with_report(done: Staged, own: Any) -> tuple[Staged, Any]:
                reduced, after = done
                report = after_arrival(gradients.replace(values=own)).sums[REPORTED]
                found = sum_over_shards(report, context.shards)
                found = as_one_report(found) if context.over_batch else found
                return (reduced.replace(sums={**reduced.sums, REPORTED: found}), after), own

            if rerun is None:
                function = without_bad if self.excludes_shards else with_report
                reduced, after = if_not_finite(done, gradients.values, function, context)
                return reduced, state._replace(aggregate=after)

            # The first turn finds which shards are not finite. The second sums again, without them
            # if they are left out: to keep what was reduced would take as much memory once more.
            def again(turn: jax.Array, carry: Any, inputs: Any) -> Any:
                first, (_, weight, report) = turn == 0, carry
                counts = ~first if weight is None else ~first & (weight != 0)
                own, state = rerun(gradients.replace(weight=weight), inputs, Rerun(counts, first))
                found = after_arrival(own)
                report = jnp.where(first, found.sums[REPORTED], report)
                if weight is not None and self.excludes_shards:
                    weight = jnp.where(first, as_counted(found.weight), weight)
                found = found.replace(weight=weight, sums={**found.sums, REPORTED: report})
                return reduced_again(found, state)[1], weight, report

            carry = done, gradients.weight, none
            (found, after), _, _ = rerun_if_not_finite(reduced, again, carry, 2, inputs)
            return found, state._replace(aggregate=after)

    def finish(
        self,
        gradients: Gradients,
        state: CrossShardState,
        before: CrossShardState,
        context: StageContext,
    ) -> Staged:
        """Run the stages after the reduction.

        ``before`` is the state before ``reduce``: a skipped step restores from it what ``reduce``
        changed.
        """
        gradients, state = self.run(Phase.UPDATE, gradients, state, context)
        if gradients.skip is not None:
            before_it = lambda stage: Phase.CALL < stage.phase <= Phase.REDUCTION
            names = [name for name, s in self._stateful.items() if before_it(s)]
            new, old = ({name: s.of(name) for name in names} for s in (state, before))
            keep = lambda new, old: jnp.where(gradients.skip, old, new)
            state = state.with_states(**jax.tree.map(keep, new, old))
        return gradients, state

    def run(
        self,
        phase: Phase,
        gradients: Gradients,
        state: CrossShardState,
        context: StageContext,
    ) -> Staged:
        """Run the stages of a phase."""
        refuse_nesting()
        for stage in self.stages:
            if stage.phase is not phase:
                continue
            if phase < Phase.REDUCTION and stage.needs_local:
                gradients = as_local(gradients, context, stage.needs_local)
            before = state.of(stage.state_field) if stage.state_field else ()
            with jax.named_scope(stage.scope) if stage.scope else contextlib.nullcontext():
                returned = stage.update(gradients, before, context)
            if stage is self.preprocess:
                name = f"{type(stage).__name__}.update"
                returned = check_returned(returned, gradients, before, name)
            gradients, after = returned
            weight = gradients.weight
            if phase in (Phase.ARRIVAL, Phase.LOCAL) and weight is not None:
                # A shard of weight 0 keeps its state, since its gradients may be NaN.
                keep = lambda new, old, weight=weight: jnp.where(weight != 0, new, old)
                after = jax.tree.map(keep, after, before)
            if stage.state_field:
                state = state.with_states(**{stage.state_field: after})
        return gradients, state

    # What callers ask before they run it.

    @property
    def of_own_gradient(self) -> dict[str, str]:
        """The options whose stages need each shard's own full gradient, and what these do to it."""
        made = [(k, s) for k, s in self._by_kind.items() if Phase.CALL < s.phase < Phase.REDUCTION]
        needs = lambda k, s: k is Preprocess or (s.needs_local and not s.takes_summed)
        words = lambda s: s.needs_local.partition(" ")[2] or "runs on"  # the first is the option
        names = lambda k: k.options or k.asked_by or ()  # of two halves, one has the option
        found = [(names(kind), words(each)) for kind, each in made if needs(kind, each)]
        return {name: what for names, what in found for name in names if name in self.options}

    @property
    def why_own_gradient(self) -> str:
        """What needs the full gradient of each shard before the reduction; empty for nothing."""
        aggregator, options = self.aggregator, self.of_own_gradient
        if options:
            return f"{next(iter(options))}="
        if isinstance(aggregator, FewBits):
            # Residuals are of gradients that are not scaled, and draws are of whole gradients.
            scaled = "a dynamic loss scale, beside few bits," * (self.loss_scale is not None)
            return "rounding at random" if aggregator.is_random else scaled
        return "" if isinstance(aggregator, Plain) else f"a sum {aggregator.describe()}"

    @property
    def measures_local(self) -> bool:
        """Whether a metric needs the norm of each shard's own gradient."""
        return LocalNorms in self._by_kind

    @property
    def excludes_shards(self) -> bool:
        """Whether a shard whose gradient is not finite does not count."""
        return self.nonfinite is not None and self.nonfinite.excludes_shards

    def shards(self, *, warn: bool = True) -> Shards:
        """Return the current shards; check the groups against their number."""
        return current_shards(self.axis_name, self.groups, warn=warn)

    @property
    def over_all_shards(self) -> bool:
        """Whether the aggregate is the same on every shard."""
        return self.groups is None or len(self.groups.groups) == 1

    def divisor(self, number: int) -> int:
        """Return the divisor of the sum over ``number`` shards: 1 under SUM."""
        return 1 if self.reduction is Reduction.SUM else number


def check_returned(returned: Any, gradients: Gradients, state: PyTree, name: str) -> Staged:
    """Return what ``update`` of a user's own stage returned, if the next stage can take it.

    Raises:
      ArgumentError: the gradients or the state have another structure.
      ArgumentTypeError: it is not ``(gradients, state)``.
    """
    after = check_pair(returned, name, "(gradients, state)", state)
    if not isinstance(after[0], Gradients):
        raise ArgumentTypeError(
            f"{name} must return (gradients, state), such as (gradients.replace(values=values), "
            f"state), of what it was given; the first was {type(after[0]).__name__}."
        )
    # Shapes are checked later, by the sum over the shards.
    of_values = f"The values that {name} returned"
    check_like(after[0].values, gradients.values, of_values, shapes=False)
    return after


def names_of_options() -> set[str]:
    """Return the names of the options of stages that a step passes on.

    A step has no ``preprocess``, and it accumulates in its own way.
    """
    return {
        name for kind in STAGES for name in kind.options if kind not in (Preprocess, Accumulate)
    }


def check_names(
    function: Any, options: Mapping[str, Any], declared: Any, *, of_steps: bool = False
) -> None:
    """Raise unless each option is one that a ``TypedDict`` or a stage declares.

    Args:
      function: the function that takes the options.
      options: the options, by name.
      declared: the ``TypedDict``.
      of_steps: whether the function makes whole steps.
    """
    others = {name for kind in STAGES if kind.of_steps for name in kind.options}
    of_stages = names_of_options() - (set() if of_steps else others)
    declared_names = sorted(of_stages | set(typing.get_type_hints(declared)))
    for name in options.keys() - declared_names:
        known = [*inspect.signature(function).parameters, *declared_names]
        if name in others:
            raise ArgumentTypeError(
                f"{function.__name__} takes no argument {name!r}, because it computes one update. "
                f"Write make_train_step(..., {name}=...)."
            )
        if of_steps and name in ("reduction", "group_assignment", "preprocess"):
            raise ArgumentTypeError(
                f"{function.__name__} takes no argument {name!r}, which is the optimizer's. Write "
                f"{function.__name__}(loss_fn, CrossShardOptimizer(optimizer, {name}=...))."
            )
        close = difflib.get_close_matches(name, known, 1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise ArgumentTypeError(
            f"{function.__name__} takes no argument {name!r}.{meant} Its options are "
            f"{', '.join(declared_names)}."
        )
