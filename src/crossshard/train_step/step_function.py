"""StepFunction: the computation of a step, from each shard's loss to the update."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from crossshard.gradients.incoming import Incoming
from crossshard.gradients.local import split_loss
from crossshard.pipeline.arrays import Arrays, GlobalArrays, LocalParts, WholeArrays
from crossshard.pipeline.arrive import arrive
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.plan import UpdateStrategy
from crossshard.pipeline.stage import Environment, Gradients
from crossshard.shards.axes import Shards
from crossshard.shards.context import shard_context
from crossshard.shards.devices import torus_factors
from crossshard.shards.partition import map_partitions
from crossshard.train_step import aux_reduction
from crossshard.train_step import model_state as model_states
from crossshard.train_step.aux_reduction import AuxReduction
from crossshard.train_step.batches import Weight, check_weight_is_read, weight_of
from crossshard.train_step.differentiate import differentiate, without_unread
from crossshard.train_step.entries import specs_of, split_entries
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.model_state import ModelState
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
      pipeline: the pipeline of the gradients.
      model_state: how the state that the loss returns is kept; ``None`` if it returns none.
      aux_reduction: how ``aux`` is reduced over the shards, a pytree prefix of it.
      replicated_entries: the names of the batch's entries that every shard gets whole.
      name: the name of the pipeline's operations in profiles and HLO.
    """

    loss_fn: Callable[..., Any]
    takes_rng: bool
    has_aux: bool
    weight: Weight | None
    pipeline: Pipeline
    name: str
    model_state: ModelState | None = None
    aux_reduction: Any = AuxReduction.PER_SHARD
    replicated_entries: tuple[str, ...] = ()

    def __call__(
        self, layout: StateLayout, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state and the metrics."""
        mesh, specs, plan = layout.mesh, layout.specs(state), layout.plan
        names = mesh.axis_names
        each = PartitionSpec(names)
        grouped = layout.groups is not None
        is_global = plan.strategy is UpdateStrategy.GLOBAL
        number = self.pipeline.shards_per_group(mesh.size)
        shards = Shards(mesh.size, names, manual=True, torus_factors=torus_factors(mesh))
        environment = Environment(
            shards,
            layout.groups,
            arrays=_arrays(layout, shards),
            divisor=self.pipeline.divisor(shards.number),
        )

        def of_one_shard(state: TrainState, batch: Any) -> Any:
            own = layout.local(state)
            gradients, model_state, aux = self._gradients(own, batch, shards, plan.unread)
            sums = model_states.to_reduce(self.model_state, model_state, gradients.weight)
            sums |= aux_reduction.to_reduce(self.aux_reduction, aux, gradients.weight)
            gradients = gradients.replace(sums={**gradients.sums, **sums})
            here = dataclasses.replace(environment, params=own.params)
            with jax.named_scope(self.name):
                if is_global:
                    params = own.params
                    gradients, opt_state = self.pipeline.reduce(gradients, own.opt_state, here)
                else:
                    params, opt_state, gradients = self.pipeline.update(
                        gradients, own.opt_state, here, apply_updates=True
                    )
            model_state = model_states.settled(
                self.model_state, own.model_state, model_state, gradients, number
            )
            own = dataclasses.replace(
                own, step=own.step + 1, params=params, opt_state=opt_state, model_state=model_state
            )
            loss = gradients.extra["value"]
            metrics = {"loss": loss[None] if grouped else loss}
            if gradients.weight is not None:
                metrics["weight"] = gradients.weight[None] if grouped else gradients.weight
            if self.has_aux:
                metrics["aux"] = aux_reduction.reduced(
                    self.aux_reduction, aux, gradients, number, grouped=grouped
                )
            reduced = gradients.values, gradients.skip
            return layout.stored(own), metrics, reduced if is_global else None

        of_group = each if grouped else PartitionSpec()
        metric_specs: dict[str, Any] = {"loss": of_group}
        if self.weight is not None:
            metric_specs["weight"] = of_group
        if self.has_aux:
            per_shard = AuxReduction.PER_SHARD
            metric_specs["aux"] = jax.tree.map(
                lambda reduction: each if reduction is per_shard else of_group, self.aux_reduction
            )
        whole = PartitionSpec()
        split = map_partitions(lambda each, _: each.spec(names), plan.params, state.params)
        run = jax.shard_map(
            of_one_shard,
            mesh=mesh,
            in_specs=(specs, specs_of(batch, self.replicated_entries, each)),
            out_specs=(specs, metric_specs, (split, whole) if is_global else None),
            # Gradients are local by construction, and gathered parameters are equal.
            check_vma=False,
        )
        state, metrics, reduced = run(state, batch)
        if reduced is not None:
            values, skip = reduced
            gradients = Gradients(values, {"value": metrics["loss"]}, skip=skip)
            here = dataclasses.replace(environment, params=state.params)
            with jax.named_scope(self.name):
                params, opt_state = self.pipeline.optimize(
                    gradients, state.opt_state, here, apply_updates=True
                )
            state = dataclasses.replace(state, params=params, opt_state=opt_state)
        return state, metrics

    def _gradients(
        self, state: TrainState, batch: Any, shards: Shards, unread: tuple[bool, ...]
    ) -> tuple[Gradients, Any, Any]:
        """This shard's gradients and loss, its model state after the loss, and ``aux``."""
        keys: tuple[jax.Array, ...] = ()
        if self.takes_rng:
            key = jax.random.wrap_key_data(state.rng, impl=state.rng_impl)
            of_step = jax.random.fold_in(key, state.step)
            keys = (jax.random.fold_in(of_step, lax.axis_index(shards.axes)),)

        def run(
            params: Any, batch: Any = batch, keys: tuple[jax.Array, ...] = keys
        ) -> tuple[Any, Any, Any, Any]:
            trained, frozen = params
            model = combine(state.skeleton, trained, frozen, state.model_state)
            if self.model_state is None:
                loss, aux = split_loss(self.loss_fn(model, batch, *keys), self.has_aux)
                return loss, aux, *after_loss(state.skeleton, model, params, state.model_state)
            # A copy, since Equinox's State may be used once.
            before = jax.tree.map(lambda x: x, state.model_state)
            after, out = model_states.split_state(
                self.loss_fn(model, before, batch, *keys), self.has_aux
            )
            after = model_states.check_returned(state.model_state, after)
            return *split_loss(out, self.has_aux), params, after

        def loss_of(params: Any) -> tuple[Any, Any]:
            both = params, state.frozen
            loss, aux, written, after = run(both)
            aux_reduction.check_aux(aux)
            check_not_written(written, both, lambda both: run(both)[2])
            return loss, (after, aux)

        with shard_context(shards.number, axis_name=shards.axes):
            if self.weight is not None:
                of_batch = lambda batch: run((state.params, state.frozen), batch)[0]
                check_weight_is_read(self.weight, batch, of_batch)
            if self.model_state is ModelState.MEAN:
                names = self.replicated_entries
                rows, whole = split_entries(batch, names) if names else (batch, {})

                def of_own(own: tuple[Any, Any]) -> Any:
                    rows, keys = own
                    given = {**rows, **whole} if names else rows
                    return run((state.params, state.frozen), given, keys)[3]

                model_states.check_equal(state.model_state, of_own, (rows, keys))
            (loss, (after, aux)), gradients = differentiate(loss_of, state.params, unread)
        weight = None if self.weight is None else weight_of(self.weight, batch)
        if weight is not None:
            after = model_states.unless_weightless(
                self.model_state, weight, after, state.model_state
            )
        gradients = arrive(
            self.pipeline,
            gradients,
            shards,
            declared=Incoming.LOCAL,
            extra={"value": jnp.asarray(loss)},
            weight=weight,
        )
        return without_unread(gradients, unread), after, aux


def _arrays(layout: StateLayout, shards: Shards) -> Arrays:
    plan = layout.plan
    if plan.strategy is UpdateStrategy.WHOLE:
        return WholeArrays()
    if plan.strategy is UpdateStrategy.PARTS:
        return LocalParts(plan.params, shards, layout.groups)
    return GlobalArrays(plan.params, plan.state, shards, layout.mesh)
