"""The Optax idiom: a pipeline as an Optax transformation, for code that runs on each shard."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sized
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from crossshard import _check, _jax
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    NestedReductionError,
    ShardContextError,
    WeightUpdateError,
)
from crossshard.gradients.status import (
    Reduction,
    check_incoming,
    check_reduction,
    inside_optimizer,
    leaf_name,
    refuse_nesting,
)
from crossshard.jaxprs.walk import depends
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stage import CrossShardState, Gradients, StageContext
from crossshard.pipeline.stages.aggregate import as_weight, check_weighable
from crossshard.pipeline.stages.nonfinite import OnNonfinite
from crossshard.pipeline.stages.preprocess import Preprocess, maker_of
from crossshard.pipeline.update.arrays import Arrays, Replicated, Sharded
from crossshard.pipeline.update.optimize import check_transformation, takes_loss
from crossshard.pipeline.update.plan import (
    Planner,
    WeightUpdate,
    check_blocks,
)
from crossshard.shards.axes import (
    Shards,
    check_axis_name,
    check_group_assignment,
    check_num_shards,
    get_shard_context,
)
from crossshard.shards.cut import Partition, Placement, map_partitions, spec_over
from crossshard.shards.devices import infer_axes


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Transformation:
    """A pipeline for code that runs on each shard.

    Per-shard state has a leading axis of 1 inside that code, so that ``P("shards")`` stacks it as
    ``[shards, …]``.
    """

    pipeline: Pipeline
    weight_update: WeightUpdate  # whether each shard updates all weights, or its slice of them
    name: str  # the name of its scope in profiles and HLO
    inner: optax.GradientTransformation  # the wrapped optimizer

    def __repr__(self) -> str:
        groups = self.pipeline.groups
        return (
            f"CrossShardOptimizer({self.of_optax}, reduction={self.pipeline.reduction.name}, "
            f"group_assignment={None if groups is None else list(map(list, groups.groups))}, "
            f"name={self.name!r})"
        )

    @classmethod
    def checked(
        cls,
        opt: optax.GradientTransformation,
        reduction: str,
        name: str,
        group_assignment: Any,
        axis_name: Any,
        incoming: str | None,
        weight_update: str,
        options: Mapping[str, Any],
    ) -> Self:
        """Return the transformation that these arguments of ``CrossShardOptimizer`` ask for."""
        reduction = check_reduction(reduction)
        inner = check_transformation(opt)
        for each in (inner, options["preprocess"]):
            if _wrapped_in(each) is not None:
                raise NestedReductionError(
                    f"{each!r} already reduces over the shards; wrapping it again would reduce "
                    f"twice. Wrap its .inner."
                )
        pipeline = Pipeline(
            optax.with_extra_args_support(inner),
            reduction,
            check_group_assignment(group_assignment),
            check_axis_name(axis_name),
            check_incoming(incoming),
            options=options,
        )
        where = _check.choice("weight_update", weight_update, WeightUpdate)
        if where is WeightUpdate.AUTO:
            raise ArgumentError(
                "weight_update='auto' is for make_train_step, which shards the state itself; pass "
                "'replicated' or 'sharded'."
            )
        return cls(pipeline, where, _check.word("name", name), inner)

    @property
    def of_optax(self) -> str:
        """The wrapped optimizer, by the name of the function that makes it."""
        return f"optax {maker_of(self.inner)}"

    @property
    def transformations(self) -> list[optax.GradientTransformationExtraArgs]:
        """The Optax transformations: the inner optimizer, and ``preprocess`` if it is one."""
        preprocess = self.pipeline.preprocess
        before = [preprocess.transformation] if isinstance(preprocess, Preprocess) else []
        return [self.pipeline.optimizer, *before]

    def describe(self) -> str:
        """Return the stages of the pipeline in one line."""
        is_sharded = self.weight_update is WeightUpdate.SHARDED
        return self.pipeline.describe(Sharded.steps) if is_sharded else self.pipeline.describe()

    def reads_value(self, value: Any, params: Any) -> bool:
        """Return whether an optimizer reads the loss, ``value``."""
        return any(_may_read_value(each, params, value) for each in self.transformations)

    def shards_of_mean(self) -> Shards:
        """Return the shards over which a ``Mean`` is counted; raise if no ``Mean`` is taken."""
        pipeline = self.pipeline
        if pipeline.reduction is Reduction.SUM:
            why = "its reduction is SUM, which adds up the losses of shards. Use MEAN."
        elif pipeline.accumulate is not None:
            number = pipeline.accumulate.steps
            why = f"it accumulates over {number} calls, and counts one. Use make_train_step."
        elif pipeline.excludes_shards:
            why = "nonfinite='quarantine' leaves out what was counted. Write nonfinite='skip'."
        else:
            return pipeline.shards(warn=False)
        raise ArgumentError(
            f"The loss returns a Mean, which is a mean over the whole batch, and this optimizer "
            f"takes none: {why}"
        )

    def init(self, params: optax.Params) -> CrossShardState:
        """Return this shard's state before the first step."""
        refuse_nesting()
        state = self.pipeline.init(params)
        if self.weight_update is WeightUpdate.SHARDED:
            shards = self.pipeline.shards()
            plan = self._plan(params, shards)
            index = shards.index_in_group()
            local = lambda partition, x: partition.local_slice(x, index)
            state = state._replace(inner_state=map_partitions(local, plan.state, state.inner_state))
        return self._map_stages(self._on_each_shard, state)

    def update(
        self,
        updates: optax.Updates,
        state: CrossShardState,
        params: optax.Params | None = None,
        *,
        incoming: str | None = None,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CrossShardState]:
        """Return the updates, equal on all shards of a group, and the next state of this shard."""
        if not isinstance(state, CrossShardState):
            raise ArgumentTypeError(
                f"The state must be the CrossShardState that init returned; got "
                f"{type(state).__name__}. The state of the inner optimizer is its inner_state."
            )
        local = self._map_stages(_local, state)
        updates, after, _ = self.update_local(updates, local, params, incoming, weight, extra_args)
        return updates, self._map_stages(lambda placement, x: placement.stored(x), after)

    def update_local(
        self,
        updates: optax.Updates,
        state: CrossShardState,
        params: optax.Params | None,
        incoming: str | None,
        weight: jax.typing.ArrayLike | None,
        extra_args: Mapping[str, Any],
    ) -> tuple[optax.Updates, CrossShardState, Gradients]:
        """Run ``update`` on a state without the axis of shards; return its gradients, too."""
        nonfinite = self.pipeline.nonfinite
        if nonfinite is not None and nonfinite.action is OnNonfinite.RAISE:
            raise ArgumentError(
                "nonfinite='raise' is for make_train_step, since compiled code cannot raise. Pass "
                "'skip' or 'quarantine', and read state.nonfinite after the step."
            )
        with jax.named_scope(self.name):
            # Under plain jit a type may say that the devices have yet to sum their values.
            of_types = updates, params, dict(extra_args)
            updates, params, extra_args = jax.tree.map(_jax.summed_by_type, of_types)
            shards = self.pipeline.shards()
            # Per-example gradients do not have the shapes of the parameters yet.
            like = updates if params is None else params
            whole = [stage.needs_whole for stage in self.pipeline.stages if stage.needs_whole]
            check_blocks(self.transformations, whole, like, shards)
            if weight is not None:
                check_weighable(self.pipeline.reduction)
            _check_functions(extra_args, like, shards)
            # Optax's names for the loss and the gradient, which some optimizers also take.
            named = {name: extra_args.get(name) for name in ("value", "grad")}
            extra = {name: value for name, value in named.items() if value is not None}
            gradients = self.pipeline.arrive(
                updates,
                shards,
                declared=check_incoming(incoming),
                extra=extra,
                weight=None if weight is None else as_weight(weight),
                params=params,
            )
            context = StageContext(
                shards,
                params,
                extra_args,
                self._arrays(like, state.inner_state, shards),
                self.pipeline.divisor(shards.group_size),
            )
            reduced, after = self.pipeline.update(gradients, state, context)
            assert reduced.updated is not None
            return reduced.updated.result, after, reduced

    def specs(self, params: Any, num_shards: Any, axis_name: Any) -> CrossShardState:
        """Return the specs of the state; see ``CrossShardOptimizer.state_specs``.

        A parameter that is split over other axes of the mesh stays split, and so does its state.
        """
        number_of_shards = check_num_shards(num_shards)
        axes = check_axis_name(axis_name) or self.pipeline.axis_name
        axes = axes or infer_axes(params, number_of_shards)
        _check.arrays("params", params, or_types=True)
        params = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), params)
        other_axes = jax.tree.map(functools.partial(_other_axes, axes=axes), params)
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
        split = any(jax.tree.leaves(other_axes, is_leaf=is_spec))
        if split and self.weight_update is WeightUpdate.SHARDED:
            raise WeightUpdateError(
                f"weight_update='sharded' splits parameters over {', '.join(axes)}, and these are "
                f"already split over other axes of the mesh. Write weight_update='replicated'."
            )
        state = jax.eval_shape(self.pipeline.init, params)
        inner = self._placements(params, number_of_shards, state.inner_state)
        placements = self.pipeline.placements(state, inner)
        if split:
            placements = optax.tree.map_params(
                self.pipeline,
                lambda placement, spec, x: placement.with_other_axes(jnp.shape(x), spec),
                placements,
                other_axes,
                params,
            )
        return jax.tree.map(lambda placement: placement.spec(axes), placements)

    def _plan(self, params: Any, shards: Shards) -> Arrays:
        """Plan how arrays are split, where each shard can update nothing but its slices."""
        pipeline, wanted = self.pipeline, self.weight_update
        planner = Planner(pipeline.optimizer, params, shards, wanted=wanted)
        return planner.plan()[0]

    def _arrays(self, params: Any, state: Any, shards: Shards) -> Arrays:
        if self.weight_update is WeightUpdate.REPLICATED:
            return Replicated()
        plan = self._plan(params, shards)
        given = [jnp.shape(leaf) for leaf in jax.tree.leaves(state)]
        expected = [partition.local_shape for partition in plan.state]
        if given != expected:
            raise ArgumentError(
                f"With weight_update='sharded' each shard has its slice of the optimizer state, in "
                f"shapes {expected}; this state has {given}. Call init inside jax.shard_map, with "
                f"out_specs=opt.state_specs(params, num_shards), or use crossshard.make_train_step."
            )
        return plan

    def _placements(self, params: Any, number_of_shards: int, state: Any) -> Any:
        if self.pipeline.groups is not None:
            for path, x in jax.tree_util.tree_leaves_with_path(params):
                if not x.shape and not self.pipeline.over_all_shards:
                    raise ArgumentError(
                        f"With group_assignment each group has parameters of its own, and "
                        f"{leaf_name(path)} is a scalar, of which shard_map keeps one for all "
                        f"shards. Make it an array of one element, x[None]."
                    )
            # Each shard has a slice of its group's state, along axis 0, since a slice has as many
            # dimensions as the full array; a scalar, such as a count, is equal on all shards.
            own = Placement(Partition((), number_of_shards))
            return jax.tree.map(lambda x: own if x.shape else Placement(), state)
        plan = self._plan(params, Shards(number_of_shards))
        return map_partitions(lambda partition, _: Placement(partition), plan.state, state)

    def _map_stages(
        self, function: Callable[[Placement, Any], Any], state: CrossShardState
    ) -> CrossShardState:
        """Return a state with ``function(placement, array)`` for the arrays of all stages."""
        stages = state._replace(inner_state=())
        mapped = jax.tree.map(function, self.pipeline.placements(stages), stages)
        return mapped._replace(inner_state=state.inner_state)

    def _on_each_shard(self, placement: Placement, x: Any) -> Any:
        """Return an array that is equal on all shards so far, in the form in which it is stored."""
        if not placement.per_shard:
            return x
        shards = self.pipeline.shards(warn=False)
        if not shards.axes and get_shard_context() is None:
            raise ShardContextError(
                "A part of this optimizer's state is one per shard, as that of preprocess=, of "
                "accumulate_steps= and of few bits, and how many shards there are is not known "
                "here. Write jax.shard_map(opt.init, mesh=mesh, in_specs=P(), out_specs=opt."
                "state_specs(params, num_shards))(params); or, in a loop without shard_map, call "
                "init within crossshard.shard_context(1)."
            )
        number = 1 if shards.axes else shards.num_shards
        return jnp.broadcast_to(shards.as_varying(x), (number, *jnp.shape(x)))


def _local(placement: Placement, x: Any) -> Any:
    """Return one shard's array, if it has the leading axis of one shard."""
    if placement.per_shard and jnp.shape(x)[:1] != (1,):
        raise ArgumentError(
            f"What each shard has of its own, as of preprocess=, of accumulate_steps= and of few "
            f"bits, is [1, …] there; this one has shape {jnp.shape(x)}. Pass the state to "
            f"shard_map with in_specs and out_specs of opt.state_specs(params, num_shards)."
        )
    return placement.local(x)


def _other_axes(param: Any, axes: tuple[str, ...]) -> PartitionSpec:
    """Return a parameter's spec on the other mesh axes."""
    spec = getattr(getattr(param, "sharding", None), "spec", PartitionSpec())
    if spec_over(spec, axes):
        raise ArgumentError(
            f"A parameter is split over the shard axes, {', '.join(axes)}: {spec}. "
            f"Every shard must have the full parameter."
        )
    return spec if any(entry is not None for entry in spec) else PartitionSpec()


def _check_functions(given: Mapping[str, Any], params: Any, shards: Shards) -> None:
    """Raise for a function that the inner optimizer would call on this shard's rows alone.

    A function whose type says that it reduces its value itself may be called.
    """

    def look(function: Callable[..., Any], params: Any) -> None:
        (value,) = jax.tree.leaves(function(params))
        reduces.append(jnp.shape(value) == () and not shards.is_varying(value))

    for name, function in given.items():
        if shards.num_shards == 1 or not callable(function):
            continue
        reduces: list[bool] = []
        if shards.has_vma:
            with contextlib.suppress(Exception):  # other arguments, or several values
                jax.eval_shape(functools.partial(look, function), params)
        if reduces != [True]:
            raise ArgumentError(
                f"{name} is a function, which the inner optimizer would call on its shard's rows, "
                f"so that shards would take different steps. Take the step on global arrays, "
                f"under jax.jit and without shard_map."
            )


def _may_read_value(
    transformation: optax.GradientTransformationExtraArgs, params: Any, value: Any
) -> bool:
    """Return whether an update depends on the loss; also if it cannot be traced alone."""

    def update(value: Any, params: Any, gradients: Any) -> Any:
        with inside_optimizer():
            return transformation.update(
                gradients, transformation.init(params), params, value=value
            )

    try:
        return takes_loss(transformation) and depends(update, value, params, params)
    except Exception:  # for example if it needs other arguments; the step itself will show it
        return True


def _wrapped_in(optimizer: Any) -> Transformation | None:
    """Return the ``Transformation`` whose methods a CrossShardOptimizer is a pair of."""
    found = getattr(getattr(optimizer, "update", None), "__self__", None)
    return found if isinstance(found, Transformation) else None


def transformation_of(optimizer: Any) -> Transformation:
    """Return an optimizer's ``Transformation``; one of Optax's is wrapped first."""
    found = _wrapped_in(optimizer)
    if found is not None:
        return found
    inner = check_transformation(optimizer)
    pipeline = Pipeline(optax.with_extra_args_support(inner), Reduction.MEAN)
    return Transformation(pipeline, WeightUpdate.REPLICATED, "CrossShardOptimizer", inner)


def pipeline_of(optimizer: Transformation, options: Mapping[str, Any]) -> Pipeline:
    """Return the pipeline of an optimizer, with further options."""
    pipeline = optimizer.pipeline
    if not options:
        return pipeline
    # Making the pipeline checks the options first.
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
