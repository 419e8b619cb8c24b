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
from crossshard.shards.model_axes import only
from crossshard.shards.partition import map_partitions
from crossshard.train_step.batches import Weight, check_weight_is_read, weight_of
from crossshard.train_step.layout import StateLayout
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
      name: the name of the pipeline's operations in profiles and HLO.
    """

    loss_fn: Callable[..., Any]
    takes_rng: bool
    has_aux: bool
    weight: Weight | None
    pipeline: Pipeline
    name: str

    def __call__(
        self, layout: StateLayout, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state and the metrics."""
        mesh, specs, plan = layout.mesh, layout.specs(state), layout.plan
        names = layout.axes
        each = PartitionSpec(names)
        grouped = layout.groups is not None
        is_global = plan.strategy is UpdateStrategy.GLOBAL
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
        )

        def of_one_shard(state: TrainState, batch: Any) -> Any:
            own = layout.local(state)
            gradients, model_state, aux = self._gradients(own, batch, shards)
            here = dataclasses.replace(environment, params=own.params)
            with jax.named_scope(self.name):
                if is_global:
                    params = own.params
                    gradients, opt_state = self.pipeline.reduce(gradients, own.opt_state, here)
                else:
                    params, opt_state, gradients = self.pipeline.update(
                        gradients, own.opt_state, here, apply_updates=True
                    )
            own = dataclasses.replace(
                own, step=own.step + 1, params=params, opt_state=opt_state, model_state=model_state
            )
            loss = gradients.extra["value"]
            metrics = {"loss": loss[None] if grouped else loss}
            if gradients.weight is not None:
                metrics["weight"] = gradients.weight[None] if grouped else gradients.weight
            if self.has_aux:
                metrics["aux"] = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
            reduced = gradients.values, gradients.skip
            return layout.stored(own), metrics, reduced if is_global else None

        of_group = each if grouped else PartitionSpec()
        metric_specs: dict[str, Any] = {"loss": of_group}
        if self.weight is not None:
            metric_specs["weight"] = of_group
        if self.has_aux:
            metric_specs["aux"] = each
        whole = PartitionSpec()
        split = map_partitions(
            lambda each, _: PartitionSpec(*only(each.spec(names), names)), plan.params, state.params
        )
        run = jax.shard_map(
            of_one_shard,
            mesh=mesh,
            axis_names=frozenset(names),
            in_specs=(specs, each),
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
        return layout.constrain(state), metrics

    def _gradients(
        self, state: TrainState, batch: Any, shards: Shards
    ) -> tuple[Gradients, Any, Any]:
        """This shard's gradients and loss, its model state after the loss, and ``aux``."""
        keys: tuple[jax.Array, ...] = ()
        if self.takes_rng:
            key = jax.random.wrap_key_data(state.rng, impl=state.rng_impl)
            of_step = jax.random.fold_in(key, state.step)
            keys = (jax.random.fold_in(of_step, lax.axis_index(shards.axes)),)

        def run(params: Any, batch: Any = batch) -> tuple[Any, Any, Any, Any]:
            model = combine(state.skeleton, params, state.model_state)
            loss, aux = split_loss(self.loss_fn(model, batch, *keys), self.has_aux)
            return loss, aux, *after_loss(state.skeleton, model, params, state.model_state)

        def loss_of(params: Any) -> tuple[Any, Any]:
            loss, aux, written, after = run(params)
            _check_aux(aux)
            check_not_written(written, params, lambda params: run(params)[2])
            return loss, (after, aux)

        with shard_context(shards.number, axis_name=shards.axes):
            if self.weight is not None:
                of_batch = lambda batch: run(state.params, batch)[0]
                check_weight_is_read(self.weight, batch, of_batch)
            (loss, (after, aux)), gradients = value_and_grad(loss_of, has_aux=True)(state.params)
        weight = None if self.weight is None else weight_of(self.weight, batch)
        if weight is not None:
            keep = functools.partial(_unless_weightless, weight)
            after = jax.tree.map(keep, after, state.model_state)
        gradients = arrive(
            self.pipeline,
            gradients,
            shards,
            declared=Incoming.LOCAL,
            extra={"value": jnp.asarray(loss)},
            weight=weight,
        )
        return gradients, after, aux


def _arrays(layout: StateLayout, shards: Shards) -> Arrays:
    plan = layout.plan
    if plan.strategy is UpdateStrategy.WHOLE and not shards.other_axes:
        return WholeArrays()
    if plan.strategy is not UpdateStrategy.GLOBAL:
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
