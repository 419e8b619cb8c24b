"""StepConfig: the parts of a step, and the step itself, from the loss to the update."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from crossshard import _jax
from crossshard.errors import ArgumentError
from crossshard.guards import SCOPE, Sentinel
from crossshard.model.layout import StateLayout
from crossshard.model.model_state import reduced_state
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stage import Gradients, StageContext, Staged
from crossshard.pipeline.stages.few_bits import FewBits
from crossshard.pipeline.stages.nonfinite import Rerun, new_nans, own_weight
from crossshard.pipeline.update.arrays import Arrays, Global
from crossshard.pipeline.update.plan import WeightUpdate
from crossshard.shards.cut import map_partitions, spec_over
from crossshard.shards.devices import number_of_shards
from crossshard.step.batches import check_same_rows
from crossshard.step.gather import AtUse
from crossshard.step.losses.loss import StepLoss, scale_of
from crossshard.step.microbatches import LocalResult


class Progress(NamedTuple):
    """The results of a step so far: the next state, the reduced ``aux`` and the metrics.

    ``gradients`` are the reduced ones; ``None`` once the update has applied them.
    """

    state: TrainState
    aux: Any
    metrics: dict[str, Any]
    gradients: Gradients | None = None


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The parts of a step. ``run`` is the step, a function of the state and the batch."""

    loss: StepLoss  # the loss, with what it does to a batch
    pipeline: Pipeline  # the pipeline of the gradients
    name: str  # the name of the pipeline's operations in profiles and HLO
    # Compares the shards' copies of the replicated state; ``None`` to skip this.
    sentinel: Sentinel | None
    # The dtype in which sharded parameters are gathered; ``None`` for that in which the
    # loss uses them.
    gather_dtype: Any
    mesh: Mesh  # the mesh, with ``AxisType.Auto`` axes, on which the step computes
    outer_mesh: Mesh  # the mesh as the user made it, which holds states, batches and metrics
    axes: tuple[str, ...]  # its shard axes
    weight_update: WeightUpdate  # where the weights are updated
    params_sharded: bool = False  # whether the parameters are sharded
    wrt: Any = None  # chooses the trained parameters; ``None`` for all
    donate: bool = True  # whether a call overwrites its state

    @property
    def number_of_shards(self) -> int:
        """The number of shards."""
        return number_of_shards(self.mesh, self.axes)

    @property
    def is_grouped(self) -> bool:
        """Whether each group has its own parameters."""
        return not self.pipeline.over_all_shards

    def run(
        self, layout: StateLayout, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """Run one step: return the next state and the metrics."""
        check_same_rows(self.loss.split(batch)[0], self.loss.batch_axes)
        found: dict[str, Any] = {}
        if self.sentinel is not None:
            with jax.named_scope(SCOPE):
                state, found["divergence"] = self.sentinel(layout, state)
        context = self._context(layout, batch)
        # An update that needs full arrays runs outside of shard_map, where XLA partitions it.
        is_global = isinstance(layout.arrays, Global)
        done, aux_of_batch = self._on_shards(layout, state, batch, context, updates=not is_global)
        if is_global:
            done = self._update(state, done, dataclasses.replace(context, params=state.params))
        if self.loss.has_aux:
            found["aux"] = done.aux if aux_of_batch is None else aux_of_batch
        return layout.constrain(done.state), {**done.metrics, **found}

    def reduced(self, layout: StateLayout, state: TrainState, batch: Any) -> tuple[Gradients, Any]:
        """Return the reduced ``Gradients``, with the loss among ``extra``, and the model state.

        They are global arrays.
        """
        context = self._context(layout, batch)
        done, _ = self._on_shards(layout, state, batch, context, updates=False)
        assert done.gradients is not None
        return done.gradients, done.state.model_state

    def _on_shards(
        self,
        layout: StateLayout,
        state: TrainState,
        batch: Any,
        context: StageContext,
        *,
        updates: bool,
    ) -> tuple[Progress, Any]:
        """Run the part of the step that is under ``shard_map``.

        It ends with the update if ``updates``, else with the reduced gradients. Also returns
        ``aux`` if it was computed before ``shard_map``, else ``None``.
        """
        at_use = self._at_use(layout, state, context)
        given, specs, aux_of_batch = self.loss.enter(layout, state, batch, at_use)

        def on_one_shard(state: TrainState, given: Any) -> Progress:
            before = layout.local(state)
            done = self._reduce(before, given, at_use, context)
            if updates:
                # The loss may have gathered the parameters; the update takes them as stored.
                opaque = self.loss.opaque_false(before)
                stored = dataclasses.replace(context, params=before.params, opaque_false=opaque)
                done = self._update(before, done, stored)
            else:
                assert done.gradients is not None
                # Divide the sums here: nothing outside of shard_map does.
                done = done._replace(gradients=done.gradients.settled())
            # The metrics of groups differ, so they get a shard axis. ``aux`` already has one.
            with_axis = lambda x: x if layout.groups is None else x[None]
            metrics = jax.tree.map(with_axis, done.metrics)
            return done._replace(state=layout.stored(done.state), metrics=metrics)

        # ``_jax.shard_map`` passes check_vma=False: gradients are local, and parameters are equal.
        on_all_shards = _jax.shard_map(
            on_one_shard,
            mesh=layout.mesh,
            axis_names=frozenset(layout.axes),
            in_specs=(layout.specs(state), specs),
            out_specs=self._out_specs(layout, state, updates),
        )
        return on_all_shards(state, given), aux_of_batch

    def _local(self, before: TrainState, given: Any, at_use: AtUse, counts_in: Any = None) -> Any:
        """Call ``loss.local``; also return the optimizer's state with the new residuals.

        The third result is the second one of ``loss.local``.
        """
        few_bits, state = at_use.few_bits, before.opt_state
        tree = jax.tree.structure(before.params)
        residuals = None if few_bits is None else few_bits.residuals(state.aggregate, tree)
        at_use = dataclasses.replace(at_use, residuals=residuals)
        local, like = self.loss.local(before, given, at_use, counts_in)
        if few_bits is not None and local.residuals is not None:
            aggregate = state.aggregate._replace(residual=tree.unflatten(local.residuals))
            state = state._replace(aggregate=aggregate)
        return local, state, like

    def _reduce(
        self, before: TrainState, given: Any, at_use: AtUse, context: StageContext
    ) -> Progress:
        """Compute the reduced gradients on one shard; ``given`` is its part of ``loss.enter``."""
        loss, pipeline, excludes = self.loss, self.pipeline, self.pipeline.excludes_shards
        local, opt_state, like = self._local(before, given, at_use)
        context = dataclasses.replace(context, params=like)
        widened = local.is_weighted or loss.accumulate_steps > 1 or pipeline.loss_scale is not None
        if local.terms is not None and excludes and pipeline.of_own_gradient:
            raise ArgumentError(
                f"The loss returns a Mean, whose gradients are computed again without a shard that "
                f"nonfinite='quarantine' leaves out, and {next(iter(pipeline.of_own_gradient))}= "
                f"changes them in between. Put a transformation before the optimizer, with "
                f"optax.chain, or write nonfinite='skip'."
            )
        gradients = pipeline.arrive(
            local.values,
            context.shards,
            declared=loss.status,
            extra={"value": local.loss},
            weight=local.weight,
            params=like,
            widened=widened,
            early=local.early,
        ).replace(
            weighted=local.is_weighted,
            early_squares=local.squared_norm,
            own_weight=None if local.terms is None else local.terms.own_weight(loss.weight_fn),
        )
        if pipeline.nonfinite is not None:
            has_nans = new_nans(local.model_state, before.model_state)
            gradients = gradients.replace(state_has_nans=has_nans)
        if excludes:
            callbacks: Any = {"others": lambda w: loss.sums(loss.with_weight(local, w, before))}
        else:
            callbacks, gradients = {}, gradients.replace(sums=loss.sums(local))
        again = loss.can_rerun and _computes_again(local, context.shards.group_size, excludes)
        if pipeline.nonfinite is not None and again:

            def rerun(gradients: Gradients, inputs: Any, how: Rerun) -> Staged:
                # A Mean's gradients are divided by the count of the shards that count.
                counts_in = gradients.weight if local.terms is not None and excludes else None
                marked = dataclasses.replace(at_use, rerun=how)
                found, opt_state, _ = self._local(inputs[0], inputs[1], marked, counts_in)
                extra = {**gradients.extra, "value": found.loss}
                values, norm = found.values, found.squared_norm
                return gradients.replace(values=values, extra=extra, early_squares=norm), opt_state

            # XLA for TPUs would copy the optimizer's state, which this does not read.
            read = dataclasses.replace(before, opt_state=before.opt_state._replace(inner_state=()))
            callbacks |= {"rerun": rerun, "inputs": (read, given)}
        with jax.named_scope(self.name):
            gradients, opt_state = pipeline.reduce(gradients, opt_state, context, **callbacks)
        if excludes:
            weight = own_weight(gradients, local.weight, context)
            local = loss.with_weight(local, weight, before)
        num_parts = loss.parts(context.shards.group_size)
        metrics = {"loss": gradients.extra["value"]}
        sums: dict[str, Any] = dict(gradients.sums)
        weighted_by = gradients
        if loss.weight_fn is not None:
            # A ``Mean`` has the weight in its counts.
            total_weight = sums["terms"].counts[-1] if "terms" in sums else gradients.weight
            weighted_by = gradients.replace(weight=total_weight)
            metrics["weight"] = weighted_by.weight
        terms = sums.get("terms", local.terms)
        if terms is not None:
            metrics |= terms.metrics() if loss.weight_fn is None else {}
            are_empty = terms.are_empty()
            gradients = gradients if are_empty is None else gradients.skipped_if(are_empty)
        aux = loss.reduced_aux(local, weighted_by, num_parts, context.shards.groups is not None)
        after = dataclasses.replace(
            before,
            step=before.step + 1,
            opt_state=opt_state,
            model_state=reduced_state(local.model_state, weighted_by, num_parts),
        )
        return Progress(after, aux, metrics, gradients)

    def _update(self, before: TrainState, reduced: Progress, context: StageContext) -> Progress:
        """Update the state with the reduced gradients: on one shard, or on global arrays."""
        after, aux, metrics, gradients = reduced
        assert gradients is not None
        with jax.named_scope(self.name):
            gradients, opt_state = self.pipeline.finish(
                gradients, after.opt_state, before.opt_state, context
            )
        assert gradients.updated is not None
        after = dataclasses.replace(after, params=gradients.updated.result, opt_state=opt_state)
        after = _unless_skipped(gradients.skip, after, before, context)
        metrics = {**metrics, **(after.opt_state.metrics or {})}
        scale = scale_of(before)
        if scale is not None:
            metrics["loss_scale"] = scale
        if self.pipeline.nonfinite is not None:
            metrics["nonfinite"] = after.opt_state.nonfinite
        if gradients.skip is not None:
            metrics["skipped"] = gradients.skip
        return Progress(after, aux, metrics)

    def _context(self, layout: StateLayout, batch: Any) -> StageContext:
        """Return the context in which the stages run on these rows."""
        shards = layout.shards
        is_global, weight = isinstance(layout.arrays, Global), self.loss.weight_fn
        rows, is_whole = self.loss.number_of_rows(batch), self.loss.over_batch
        return StageContext(
            shards,
            arrays=layout.arrays,
            # XLA has summed the gradient of a loss over the batch, which is not divided.
            divisor=1 if is_whole else self.pipeline.divisor(self.loss.parts(shards.group_size)),
            over_batch=is_whole,
            examples=rows // shards.num_shards if weight is None else 1,
            skips_by_loop=shards.groups is None and not is_global and shards.platform == "cpu",
            apply_updates=True,
        )

    def why_own_gradient(self, arrays: Arrays) -> str:
        """Return what needs the full gradient of each shard; empty if it may be summed early."""
        pipeline, number = self.pipeline, self.loss.accumulate_steps
        after_all = isinstance(pipeline.aggregator, FewBits) or pipeline.measures_local
        if after_all and arrays.params_sharded and number > 1:
            # Residuals and norms need the mean over microbatches, which only the last completes.
            return f"the mean of {number} microbatches"
        return pipeline.why_own_gradient

    def _at_use(self, layout: StateLayout, state: TrainState, context: StageContext) -> AtUse:
        arrays, pipeline = layout.arrays, self.pipeline
        sums_later = bool(self.why_own_gradient(arrays))
        few_bits = pipeline.aggregator if isinstance(pipeline.aggregator, FewBits) else None
        return AtUse(
            arrays.params,
            context.shards,
            arrays.params_sharded,
            arrays.unread,
            pipeline.reduce_dtype,
            self.gather_dtype,
            sums_later,
            use_of_frozen(layout, state.frozen, self.gather_dtype),
            layout.uses,
            few_bits=None if sums_later else few_bits,
            divisor=context.divisor,
            measures=pipeline.measures_local and not sums_later,
        )

    def _specs_by_group(self, layout: StateLayout) -> tuple[Any, Any]:
        """Return the spec of what each group has alone, such as a loss, and those of ``aux``."""
        per_shard = PartitionSpec(layout.axes)
        per_group = PartitionSpec() if layout.groups is None else per_shard
        return per_group, self.loss.aux_specs(per_shard, per_group, layout.shards.num_shards)

    def _out_specs(self, layout: StateLayout, state: TrainState, updates: bool) -> Progress:
        """Return the specs of the results of ``shard_map``."""
        (per_group, aux), names = self._specs_by_group(layout), layout.axes
        if updates:
            return Progress(layout.specs(state), aux, per_group)
        replicated: Any = PartitionSpec()
        spec_of = lambda partition, _: spec_over(partition.spec(names), names)
        values = map_partitions(spec_of, layout.arrays.params, state.params)
        # All but the values is the same on all shards.
        same = dict.fromkeys(("weight", "sums", "skip", "finite"), replicated)
        gradients = Gradients(values, {"value": replicated}, **same)
        return Progress(layout.specs(state), aux, per_group, gradients)

    def specs_of_metrics(self, layout: StateLayout, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the specs of a step's metrics, by name."""
        per_group, aux = self._specs_by_group(layout)
        kinds = {"aux": aux, "divergence": PartitionSpec()}
        spread = lambda spec, tree: jax.tree.map(lambda _: spec, tree)
        is_spec = lambda x: isinstance(x, PartitionSpec)
        return {
            name: jax.tree.map(spread, kinds.get(name, per_group), found, is_leaf=is_spec)
            for name, found in metrics.items()
        }

    def describe(self, arrays: Arrays | None = None) -> str:
        """Describe the stages in the order in which they run, in one line."""
        return self.pipeline.describe(
            ("update",) if arrays is None else arrays.steps,
            weighted=self.loss.weight_fn is not None,
            params_sharded=arrays is not None and arrays.params_sharded,
            of_loss=self.loss.gradient_in_words,
            microbatches=self.loss.accumulate_steps,
        )


def to_read(layout: StateLayout, state: TrainState) -> AtUse:
    """Return how one shard gets parameters that it only reads."""
    arrays, frozen = layout.arrays, use_of_frozen(layout, state.frozen)
    return AtUse(
        arrays.params, layout.shards.all, params_sharded=arrays.params_sharded, frozen=frozen
    )


def use_of_frozen(layout: StateLayout, frozen: Any, gather_dtype: Any = None) -> AtUse | None:
    """Return how a shard gets the frozen arrays; ``None`` if all of them are replicated."""
    partitions = layout.partitions_of_frozen(frozen)
    if all(each.number == 1 for each in partitions):
        return None
    return AtUse(partitions, layout.shards, params_sharded=True, gather_dtype=gather_dtype)


# Smaller gradients are kept: that is little memory, and a second computation takes long to compile.
_LARGE_BYTES = 1 << 20


def _computes_again(local: LocalResult, shards: int, excludes: bool) -> bool:
    """Return whether to compute gradients again if they are not finite, rather than keep them.

    Summed gradients cannot be taken apart; leaving out a shard changes the others' gradients of a
    ``Mean``; and keeping large gradients beside their sum would take memory in every step.
    """
    if any(local.early) or (excludes and local.terms is not None):
        return True
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(local.values))
    return shards > 1 and size >= _LARGE_BYTES


def _unless_skipped(
    skip: jax.Array | None, after: TrainState, before: TrainState, context: StageContext
) -> TrainState:
    """Return the next state, with the old step count and model state if the step is skipped."""
    if skip is None:
        return after
    # Groups may skip on their own, but share one step count: it waits only if all of them skip.
    by_all = context.on_all_shards(skip)
    keep = lambda new, old: jnp.where(skip, old, new)
    return dataclasses.replace(
        after,
        step=jnp.where(by_all, before.step, after.step),
        model_state=jax.tree.map(keep, after.model_state, before.model_state),
    )
