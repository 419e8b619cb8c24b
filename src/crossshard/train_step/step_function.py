"""StepFunction: the computation of a step, from each shard's loss to the update."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from crossshard.gradients.incoming import Incoming
from crossshard.pipeline.arrays import Arrays, GlobalArrays, LocalParts, WholeArrays
from crossshard.pipeline.arrive import arrive
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.plan import UpdateStrategy
from crossshard.pipeline.stage import Environment, Gradients
from crossshard.shards.axes import Shards
from crossshard.shards.devices import torus_factors
from crossshard.shards.model_axes import only
from crossshard.shards.partition import map_partitions
from crossshard.train_step.batches import check_same_rows
from crossshard.train_step.divergence import Sentinel
from crossshard.train_step.entries import specs_of
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.local import Loss
from crossshard.train_step.microbatches import Local
from crossshard.train_step.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepFunction:
    """The step as a pure function of the state and the batch.

    Attributes:
      loss: the loss of one shard's rows of the batch.
      pipeline: the pipeline of the gradients.
      name: the name of the pipeline's operations in profiles and HLO.
      sentinel: what compares the shards' copies of the state; ``None`` if nothing does.
    """

    loss: Loss
    pipeline: Pipeline
    name: str
    sentinel: Sentinel | None = None

    def describe(self, strategy: UpdateStrategy | None = None) -> str:
        """The stages in the order in which they run, in one line."""
        text = self.pipeline.describe(strategy, weighted=self.loss.weight is not None)
        number = self.loss.accumulate_steps
        if number == 1:
            return text
        first, rest = text.split(" → ", 1)
        return f"{first} → accumulate {number} microbatches → {rest}"

    def names_of_metrics(self) -> list[str]:
        """The names of the metrics, in the order of their importance."""
        weight = ["weight"] if self.loss.weight is not None else []
        aux = ["aux"] if self.loss.has_aux else []
        divergence = ["divergence"] if self.sentinel is not None else []
        return ["loss", *weight, *aux, *self._names_of_stages(), *divergence]

    def __call__(
        self, layout: StateLayout, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state and the metrics.

        Raises:
          ArgumentError: the arrays of the batch have different numbers of rows.
        """
        check_same_rows(jax.tree_util.tree_leaves_with_path(self.loss.split(batch)[0]))
        if self.sentinel is None:
            return self._step(layout, state, batch)
        with jax.named_scope("check_divergence"):
            state, found = self.sentinel(layout, state)
        after, metrics = self._step(layout, state, batch)
        return after, {**metrics, "divergence": found}

    def _step(
        self, layout: StateLayout, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        mesh, specs, plan = layout.mesh, layout.specs(state), layout.plan
        names = layout.axes
        each = PartitionSpec(names)
        grouped = layout.groups is not None
        is_global = plan.strategy is UpdateStrategy.GLOBAL
        number = self.pipeline.shards_per_group(layout.number_of_shards)
        shards = Shards(
            layout.number_of_shards,
            names,
            manual=True,
            torus_factors=torus_factors(mesh),
            other_axes=layout.unnamed_axes,
        )
        environment = Environment(
            shards,
            layout.groups,
            arrays=_arrays(layout, shards),
            divisor=self.pipeline.divisor(shards.number),
            unread=plan.unread,
            skips_by_loop=(
                layout.groups is None
                and plan.strategy is not UpdateStrategy.GLOBAL
                and mesh.devices.flat[0].platform == "cpu"
            ),
        )

        def of_one_shard(state: TrainState, batch: Any) -> Any:
            own = layout.local(state)
            scale = own.opt_state.loss_scale.scale if self.pipeline.loss_scale else None
            local = self.loss.differentiate(own, batch, shards, plan.unread, scale)
            rows = self.loss.number_of_rows(batch)
            here = dataclasses.replace(environment, params=own.params, examples=rows)
            weight = local.weight
            if self.pipeline.nonfinite is not None and self.pipeline.excludes_shards:
                own_weight = self.pipeline.nonfinite.weight(local.values, weight, here)
                local = self.loss.with_weight(local, own_weight, own)
            gradients = self._arrive(local, shards).replace(weight=weight)
            after = dataclasses.replace(own, step=own.step + 1)
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
            model_state = self.loss.settled_state(local, gradients, number)
            after = dataclasses.replace(after, model_state=model_state)
            if not is_global:
                after = _unless_skipped(gradients.skip, after, own, here)
                metrics = self._metrics_of_stages(own, after, gradients.skip)
            metrics["loss"] = gradients.extra["value"]
            if self.loss.weight is not None:
                metrics["weight"] = gradients.weight
            if grouped:
                metrics = jax.tree.map(lambda x: x[None], metrics)
            if self.loss.has_aux:
                metrics["aux"] = self.loss.reduced_aux(local, gradients, number, grouped)
            reduced = gradients.values, gradients.weight, gradients.sums, gradients.skip
            return layout.stored(after), metrics, reduced if is_global else None

        of_group = each if grouped else PartitionSpec()
        in_shards = ["loss"] if self.loss.weight is None else ["loss", "weight"]
        metric_specs: dict[str, Any] = dict.fromkeys(in_shards, of_group)
        if not is_global:
            metric_specs |= dict.fromkeys(self._names_of_stages(), of_group)
        if self.loss.has_aux:
            metric_specs["aux"] = self.loss.aux_specs(each, of_group)
        whole = PartitionSpec()
        split = map_partitions(
            lambda each, _: PartitionSpec(*only(each.spec(names), names)), plan.params, state.params
        )
        run = jax.shard_map(
            of_one_shard,
            mesh=mesh,
            axis_names=frozenset(names),
            in_specs=(specs, specs_of(batch, self.loss.replicated_entries, each)),
            out_specs=(specs, metric_specs, (split, whole, whole, whole) if is_global else None),
            # Gradients are local by construction, and gathered parameters are equal.
            check_vma=False,
        )
        after, metrics, reduced = run(state, batch)
        if reduced is not None:
            values, *others = reduced
            gradients = Gradients(values, {"value": metrics["loss"]}, *others)
            rows = self.loss.number_of_rows(batch) // shards.number
            here = dataclasses.replace(environment, params=state.params, examples=rows)
            with jax.named_scope(self.name):
                params, opt_state, gradients = self.pipeline.optimize(
                    gradients, after.opt_state, here, before=state.opt_state, apply_updates=True
                )
            after = dataclasses.replace(after, params=params, opt_state=opt_state)
            after = _unless_skipped(gradients.skip, after, state, here)
            metrics |= self._metrics_of_stages(state, after, gradients.skip)
        return layout.constrain(after), metrics

    def _arrive(self, local: Local, shards: Shards) -> Gradients:
        """One shard's gradients with all that is reduced with them."""
        gradients = arrive(
            self.pipeline,
            local.values,
            shards,
            declared=Incoming.LOCAL,
            extra={"value": local.loss},
            weight=local.weight,
        )
        widened = self.loss.accumulate_steps > 1 or self.pipeline.loss_scale is not None
        return gradients.replace(widened=widened, sums=self.loss.sums(local))

    def _names_of_stages(self) -> list[str]:
        """The names of the metrics that ``_metrics_of_stages`` returns."""
        scale = ["loss_scale"] if self.pipeline.loss_scale is not None else []
        nonfinite = ["nonfinite"] if self.pipeline.nonfinite is not None else []
        may_skip = bool(scale or nonfinite) or self.loss.weight is not None
        skipped = ["skipped"] if may_skip else []
        return [*self.pipeline.metrics.names, *scale, *nonfinite, *skipped]

    def _metrics_of_stages(
        self, before: TrainState, after: TrainState, skip: jax.Array | None
    ) -> dict[str, Any]:
        """The metrics that stages keep in their state, and whether the step was skipped."""
        scale = before.opt_state.loss_scale.scale if self.pipeline.loss_scale is not None else None
        found = {
            **(after.opt_state.metrics or {}),
            "loss_scale": scale,
            "nonfinite": after.opt_state.nonfinite,
            "skipped": skip,
        }
        return {name: found[name] for name in self._names_of_stages()}


def _unless_skipped(
    skip: jax.Array | None, after: TrainState, before: TrainState, environment: Environment
) -> TrainState:
    """The next state; if the step is skipped, with the step count and model state from before."""
    if skip is None:
        return after
    # Groups may differ, and the count is one for all of them.
    by_all = environment.on_all_shards(skip)
    keep = lambda new, old: jnp.where(skip, old, new)
    return dataclasses.replace(
        after,
        step=jnp.where(by_all, before.step, after.step),
        model_state=jax.tree.map(keep, after.model_state, before.model_state),
    )


def _arrays(layout: StateLayout, shards: Shards) -> Arrays:
    plan = layout.plan
    if plan.strategy is UpdateStrategy.WHOLE and not shards.other_axes:
        return WholeArrays()
    if plan.strategy is not UpdateStrategy.GLOBAL:
        return LocalParts(plan.params, shards, layout.groups)
    return GlobalArrays(plan.params, plan.state, shards, layout.mesh)
