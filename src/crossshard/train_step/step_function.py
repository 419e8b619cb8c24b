"""StepFunction: the computation of a step, from each shard's loss to the update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from crossshard.errors import ArgumentTypeError
from crossshard.gradients.incoming import Incoming
from crossshard.gradients.local import split_loss, value_and_grad
from crossshard.gradients.scalars import is_number
from crossshard.pipeline.arrays import Arrays, GlobalArrays, LocalParts, WholeArrays
from crossshard.pipeline.arrive import arrive
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.plan import UpdateStrategy
from crossshard.pipeline.stage import Environment, Gradients
from crossshard.shards.axes import Shards
from crossshard.shards.context import shard_context
from crossshard.shards.devices import torus_factors
from crossshard.shards.partition import map_partitions
from crossshard.train_step.batches import Weight, check_weight_is_read, weight_of
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.microbatches import Local, over_microbatches
from crossshard.train_step.models import after_loss, check_not_written, combine
from crossshard.train_step.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepFunction:
    """The step as a pure function of the state and the batch.

    Attributes:
      loss_fn: the loss of one shard's rows of the batch.
      takes_rng: whether the loss takes a PRNG key.
      has_aux: whether the loss returns ``(loss, aux)``.
      weight: the weight function of the mean; ``None`` if all shards count the same.
      accumulate_steps: the number of microbatches of a shard's rows.
      pipeline: the pipeline of the gradients.
      name: the name of the pipeline's operations in profiles and HLO.
    """

    loss_fn: Callable[..., Any]
    takes_rng: bool
    has_aux: bool
    weight: Weight | None
    accumulate_steps: int
    pipeline: Pipeline
    name: str

    def describe(self, strategy: UpdateStrategy | None = None) -> str:
        """The stages in the order in which they run, in one line."""
        text = self.pipeline.describe(strategy, weighted=self.weight is not None)
        if self.accumulate_steps == 1:
            return text
        first, rest = text.split(" → ", 1)
        return f"{first} → accumulate {self.accumulate_steps} microbatches → {rest}"

    def __call__(
        self, layout: StateLayout, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state and the metrics."""
        mesh, specs, plan = layout.mesh, layout.specs(state), layout.plan
        names = mesh.axis_names
        each = PartitionSpec(names)
        grouped = layout.groups is not None
        is_global = plan.strategy is UpdateStrategy.GLOBAL
        shards = Shards(mesh.size, names, manual=True, torus_factors=torus_factors(mesh))
        environment = Environment(
            shards,
            layout.groups,
            arrays=_arrays(layout, shards),
            divisor=self.pipeline.divisor(shards.number),
        )

        def of_one_shard(state: TrainState, batch: Any) -> Any:
            own = layout.local(state)
            gradients, model_state, aux = self._gradients(own, batch, shards)
            here = dataclasses.replace(environment, params=own.params, examples=_rows(batch))
            after = dataclasses.replace(own, step=own.step + 1, model_state=model_state)
            metrics: dict[str, Any] = {}
            with jax.named_scope(self.name):
                if is_global:
                    gradients, opt_state = self.pipeline.reduce(gradients, own.opt_state, here)
                    after = dataclasses.replace(after, opt_state=opt_state)
                else:
                    params, opt_state, gradients = self.pipeline.update(
                        gradients, own.opt_state, here, apply_updates=True
                    )
                    after = dataclasses.replace(after, params=params, opt_state=opt_state)
                    after = _unless_skipped(gradients.skip, after, own, here)
                    metrics = self._metrics_of_stages(own, after, gradients.skip)
            metrics["loss"] = gradients.extra["value"]
            if gradients.weight is not None:
                metrics["weight"] = gradients.weight
            if grouped:
                metrics = jax.tree.map(lambda x: x[None], metrics)
            if self.has_aux:
                metrics["aux"] = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
            reduced = gradients.values, gradients.sums, gradients.skip
            return layout.stored(after), metrics, reduced if is_global else None

        of_group = each if grouped else PartitionSpec()
        in_shards = ["loss"] if self.weight is None else ["loss", "weight"]
        metric_specs: dict[str, Any] = dict.fromkeys(in_shards, of_group)
        if not is_global:
            metric_specs |= dict.fromkeys(self._names_of_stages(), of_group)
        if self.has_aux:
            metric_specs["aux"] = each
        whole = PartitionSpec()
        split = map_partitions(lambda each, _: each.spec(names), plan.params, state.params)
        run = jax.shard_map(
            of_one_shard,
            mesh=mesh,
            in_specs=(specs, each),
            out_specs=(specs, metric_specs, (split, whole, whole) if is_global else None),
            # Gradients are local by construction, and gathered parameters are equal.
            check_vma=False,
        )
        after, metrics, reduced = run(state, batch)
        if reduced is not None:
            values, sums, skip = reduced
            gradients = Gradients(
                values, {"value": metrics["loss"]}, metrics.get("weight"), sums, skip
            )
            rows = _rows(batch) // shards.number
            here = dataclasses.replace(environment, params=state.params, examples=rows)
            with jax.named_scope(self.name):
                params, opt_state, gradients = self.pipeline.optimize(
                    gradients, after.opt_state, here, before=state.opt_state, apply_updates=True
                )
            after = dataclasses.replace(after, params=params, opt_state=opt_state)
            after = _unless_skipped(gradients.skip, after, state, here)
            metrics |= self._metrics_of_stages(state, after, gradients.skip)
        return after, metrics

    def _names_of_stages(self) -> list[str]:
        """The names of the metrics that ``_metrics_of_stages`` returns."""
        scale = ["loss_scale"] if self.pipeline.loss_scale is not None else []
        may_skip = bool(scale) or self.weight is not None
        return [*self.pipeline.metrics.names, *scale, *(["skipped"] if may_skip else [])]

    def _metrics_of_stages(
        self, before: TrainState, after: TrainState, skip: jax.Array | None
    ) -> dict[str, Any]:
        """The metrics that stages keep in their state, and whether the step was skipped."""
        scale = before.opt_state.loss_scale.scale if self.pipeline.loss_scale is not None else None
        found = {**(after.opt_state.metrics or {}), "loss_scale": scale, "skipped": skip}
        return {name: found[name] for name in self._names_of_stages()}

    def _gradients(
        self, state: TrainState, batch: Any, shards: Shards
    ) -> tuple[Gradients, Any, Any]:
        """This shard's gradients and loss, its model state after the loss, and ``aux``."""
        number = self.accumulate_steps
        if number == 1:
            local = self._of_rows(state, shards, batch, state.model_state, state.step)
        else:

            def compute(rows: Any, model_state: Any, index: Any) -> Local:
                return self._of_rows(state, shards, rows, model_state, state.step * number + index)

            local = over_microbatches(number, compute, state.params, state.model_state, batch)
        gradients = arrive(
            self.pipeline,
            local.values,
            shards,
            declared=Incoming.LOCAL,
            extra={"value": jnp.asarray(local.loss)},
            weight=None if self.weight is None else local.weight,
        )
        widened = number > 1 or self.pipeline.loss_scale is not None
        return gradients.replace(widened=widened), local.model_state, local.aux

    def _of_rows(
        self, state: TrainState, shards: Shards, batch: Any, model_state: Any, count: Any
    ) -> Local:
        """The gradient and loss of some rows; ``count`` counts the microbatches of all steps."""
        keys: tuple[jax.Array, ...] = ()
        if self.takes_rng:
            key = jax.random.wrap_key_data(state.rng, impl=state.rng_impl)
            of_step = jax.random.fold_in(key, count)
            keys = (jax.random.fold_in(of_step, lax.axis_index(shards.axes)),)

        def run(params: Any, batch: Any = batch) -> tuple[Any, Any, Any, Any]:
            model = combine(state.skeleton, params, model_state)
            loss, aux = split_loss(self.loss_fn(model, batch, *keys), self.has_aux)
            return loss, aux, *after_loss(state.skeleton, model, params, model_state)

        def loss_of(params: Any) -> tuple[Any, Any]:
            loss, aux, written, after = run(params)
            _check_aux(aux)
            check_not_written(written, params, lambda params: run(params)[2])
            return loss, (after, aux)

        scale = None
        if self.pipeline.loss_scale is not None:
            scale = state.opt_state.loss_scale.scale
        with shard_context(shards.number, axis_name=shards.axes):
            if self.weight is not None:
                of_batch = lambda batch: run(state.params, batch)[0]
                check_weight_is_read(self.weight, batch, of_batch)
            (loss, (after, aux)), gradients = value_and_grad(
                loss_of, has_aux=True, loss_scale=scale
            )(state.params)
        weight = None if self.weight is None else weight_of(self.weight, batch)
        if weight is not None:
            keep = functools.partial(_unless_weightless, weight)
            after = jax.tree.map(keep, after, model_state)
        return Local(loss, gradients, weight, after, aux)


def _rows(batch: Any) -> int:
    """The number of rows of a batch."""
    return int(jax.tree.leaves(batch)[0].shape[0])


def _unless_skipped(
    skip: jax.Array | None, after: TrainState, before: TrainState, environment: Environment
) -> TrainState:
    """The next state; if the step is skipped, with the step count and model state from before."""
    if skip is None:
        return after
    # Groups may differ, and the count is one for all of them.
    by_all = skip if environment.groups is None else environment.on_all_shards(skip)
    keep = lambda new, old: jnp.where(skip, old, new)
    return dataclasses.replace(
        after,
        step=jnp.where(by_all, before.step, after.step),
        model_state=jax.tree.map(keep, after.model_state, before.model_state),
    )


def _arrays(layout: StateLayout, shards: Shards) -> Arrays:
    plan = layout.plan
    if plan.strategy is UpdateStrategy.WHOLE:
        return WholeArrays()
    if plan.strategy is UpdateStrategy.PARTS:
        return LocalParts(plan.params, shards, layout.groups)
    return GlobalArrays(plan.params, plan.state, shards, layout.mesh)


def _unless_weightless(weight: jax.Array, after: Any, before: Any) -> Any:
    """A module's array after the loss; unchanged on a shard that has only padding."""
    floating = jnp.issubdtype(after.dtype, jnp.inexact)
    return jnp.where(weight != 0, after, before) if floating else after


def _check_aux(aux: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not is_number(leaf):
            raise ArgumentTypeError(
                f"aux{jax.tree_util.keystr(path)} is {leaf!r:.40} ({type(leaf).__name__}); aux "
                f"must hold arrays and numbers. Leave out of aux what never changes."
            )
