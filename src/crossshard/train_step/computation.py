"""What a step computes: each shard's loss and gradients, their reduction, and the weight update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.collectives.parts import Cut
from crossshard.collectives.together import gather_together
from crossshard.errors import ArgumentTypeError
from crossshard.gradients.incoming import Incoming
from crossshard.gradients.local import split_loss, value_and_grad
from crossshard.gradients.once import only_reduction
from crossshard.gradients.pipeline import Pipeline
from crossshard.optimizer.weight_update import Path, map_cuts, step
from crossshard.runners.split import is_numeric
from crossshard.shards.axes import Shards
from crossshard.shards.context import shard_context
from crossshard.shards.devices import rings_of
from crossshard.train_step.batches import Weight, weight_of
from crossshard.train_step.models import others_after, put_together
from crossshard.train_step.placing import Placing
from crossshard.train_step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Computation:
    """The step as a pure function of the state and the batch.

    Attributes:
      loss_fn: the loss of one shard's part of the batch.
      takes_rng: whether it takes a key as well.
      has_aux: whether it returns ``(loss, aux)``.
      weight: what a shard counts in the mean; ``None`` for all alike.
      pipeline: how gradients are reduced.
      inner: the update rule.
      name: a name to find the reduction and the update by in profiles and HLO.
    """

    loss_fn: Callable[..., Any]
    takes_rng: bool
    has_aux: bool
    weight: Weight | None
    pipeline: Pipeline
    inner: optax.GradientTransformationExtraArgs
    name: str

    def __call__(
        self, placing: Placing, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state and the metrics."""
        mesh, specs = placing.mesh, placing.specs(state)
        names = mesh.axis_names
        each = PartitionSpec(names)
        grouped = placing.groups is not None
        shards = Shards(mesh.size, names, manual=True, rings=rings_of(mesh))

        def of_one_shard(state: TrainState, batch: Any) -> Any:
            own = placing.of_one_shard(state)
            loss, gradients, others, aux = self._gradients(own, batch, shards)
            weight = None if self.weight is None else weight_of(self.weight, batch)
            if weight is not None:
                keep = functools.partial(_unless_weightless, weight)
                others = jax.tree.map(keep, others, own.others)
            with jax.named_scope(self.name):
                loss, gradients = self.pipeline.reduce(
                    (loss, gradients),
                    shards,
                    Incoming.LOCAL,
                    weight=weight,
                    cuts=(Cut(()), *placing.plan.params),
                )
                own = dataclasses.replace(own, step=own.step + 1, others=others)
                if placing.plan.path is not Path.GLOBAL:
                    own = self._updated(placing, own, gradients, loss, shards)
                    gradients = None
            metrics = {"loss": loss[None] if grouped else loss}
            if self.has_aux:
                metrics["aux"] = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
            return placing.of_all_shards(own), metrics, gradients

        metric_specs: dict[str, Any] = {"loss": each if grouped else PartitionSpec()}
        if self.has_aux:
            metric_specs["aux"] = each
        as_cut = map_cuts(lambda cut, _: cut.spec(names), placing.plan.params, state.params)
        run = jax.shard_map(
            of_one_shard,
            mesh=mesh,
            in_specs=(specs, each),
            out_specs=(specs, metric_specs, as_cut if placing.plan.path is Path.GLOBAL else None),
            # The gradients are local by construction, and parts that are gathered are equal.
            check_vma=False,
        )
        state, metrics, gradients = run(state, batch)
        if placing.plan.path is Path.GLOBAL:
            with jax.named_scope(self.name):
                state = self._updated_globally(placing, state, gradients, metrics["loss"], shards)
        return state, metrics

    def _gradients(self, state: TrainState, batch: Any, shards: Shards) -> tuple[Any, ...]:
        """This shard's loss and gradients, its other arrays after the loss, and ``aux``."""
        keys: tuple[jax.Array, ...] = ()
        if self.takes_rng:
            key = jax.random.wrap_key_data(state.rng, impl=state.rng_impl)
            of_step = jax.random.fold_in(key, state.step)
            keys = (jax.random.fold_in(of_step, lax.axis_index(shards.axes)),)

        def loss_of(params: Any) -> tuple[Any, Any]:
            model = put_together(state.skeleton, params, state.others)
            loss, aux = split_loss(self.loss_fn(model, batch, *keys), self.has_aux)
            _check_floating(loss)
            _check_aux(aux)
            return loss, (others_after(state.skeleton, model, params, state.others), aux)

        with shard_context(shards.number, axis_name=shards.axes):
            (loss, (others, aux)), gradients = value_and_grad(loss_of, has_aux=True)(state.params)
        return jnp.asarray(loss), gradients, others, aux

    def _updated(
        self, placing: Placing, state: TrainState, gradients: Any, loss: Any, shards: Shards
    ) -> TrainState:
        """This shard's update of its part, or of all, and the parameters gathered."""
        cuts, groups = placing.plan.params, placing.groups
        own = map_cuts(lambda cut, x: cut.own(x, shards, groups), cuts, state.params)
        with only_reduction():
            own, opt_state = step(self.inner, gradients, state.opt_state, own, loss)
        parts, tree = jax.tree.flatten(own)
        params = tree.unflatten(gather_together(parts, cuts, shards, groups))
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    def _updated_globally(
        self, placing: Placing, state: TrainState, gradients: Any, loss: Any, shards: Shards
    ) -> TrainState:
        """The update on global arrays, each laid out as it is cut; XLA sends what it needs."""

        def as_cut(cuts: tuple[Cut, ...], tree: Any) -> Any:
            names = placing.mesh.axis_names
            return map_cuts(lambda cut, x: _lie(placing.mesh, cut.spec(names), x), cuts, tree)

        plan = placing.plan
        params = as_cut(plan.params, state.params)
        with only_reduction():
            params, opt_state = step(
                self.inner, as_cut(plan.params, gradients), state.opt_state, params, loss
            )
        parts, tree = jax.tree.flatten(as_cut(plan.params, params))
        # By hand, since XLA for TPUs makes an all-reduce of a gathering over all chips.
        gather = jax.shard_map(
            lambda parts: gather_together(parts, plan.params, shards),
            mesh=placing.mesh,
            in_specs=([cut.spec(shards.axes) for cut in plan.params],),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        params, opt_state = tree.unflatten(gather(parts)), as_cut(plan.state, opt_state)
        return dataclasses.replace(state, params=params, opt_state=opt_state)


def _unless_weightless(weight: jax.Array, after: Any, before: Any) -> Any:
    """What a module's array is after the loss; statistics of padding alone are not taken up."""
    floating = jnp.issubdtype(after.dtype, jnp.inexact)
    return jnp.where(weight != 0, after, before) if floating else after


def _check_floating(loss: Any) -> None:
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ArgumentTypeError(
            f"A loss must be a floating scalar; this one has dtype {jnp.result_type(loss)}."
        )


def _check_aux(aux: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not is_numeric(leaf) and not isinstance(leaf, bool):
            raise ArgumentTypeError(
                f"aux{jax.tree_util.keystr(path)} is {leaf!r:.40} ({type(leaf).__name__}); what a "
                f"step returns are arrays and numbers."
            )


def _lie(mesh: Mesh, spec: PartitionSpec, x: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
