"""Flops: how many rows a call of a step takes, and the floating-point operations of its loss."""

import dataclasses
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from crossshard import _jax, _mesh
from crossshard.gradients.mean import Mean
from crossshard.jaxprs.products import Products, products
from crossshard.jaxprs.rewrite import without_checkpoints
from crossshard.pipeline.stage import CrossShardState
from crossshard.shards.axes import shard_context
from crossshard.shards.batch_axes import resized
from crossshard.step.batches import BatchPlacer
from crossshard.step.function import to_read
from crossshard.step.losses.rows import LossOver
from crossshard.step.train_step import TrainStep, config_of, latest_of


def number_of_rows(step: TrainStep, batch: Any) -> int:
    """Return the rows of a call of all processes, which are taken to pass as many each."""
    config = config_of(step)
    where = BatchPlacer(config.outer_mesh, config.axes, config.loss)
    rows, _ = where.split(batch, or_types=True)
    leaf, axis = jax.tree.leaves(rows)[0], where.batch_axes.of_rows(rows)[0]
    own = leaf.shape[axis]
    return int(own if where.is_placed(leaf, axis) else own * where.number // where.parts)


def products_of(step: TrainStep, batch: Any) -> tuple[Products, Products]:
    """Count the products of the loss of a batch and its gradient, of all shards and microbatches.

    The first result is without what ``jax.checkpoint`` computes again and without the rows that pad
    a batch, and the second with both.
    """
    config, (layout, types) = config_of(step), latest_of(step)
    loss, axes, rows = config.loss, config.loss.batch_axes, number_of_rows(step, batch)
    batch = BatchPlacer(config.outer_mesh, config.axes, loss).abstract(batch)
    is_whole = loss.over is LossOver.BATCH
    shards = 1 if is_whole else config.number_of_shards
    number = loss.accumulate_steps if is_whole else shards * loss.pieces(shards)

    def of_piece(x: Any, axis: int | None) -> Any:
        rows = 0 if axis is None else x.shape[axis] // number
        return jax.ShapeDtypeStruct(resized(x.shape, axis, rows), x.dtype)

    leaves, tree = jax.tree.flatten(batch)
    piece = tree.unflatten(map(of_piece, leaves, axes.of(batch)))
    at_use, own = to_read(layout, types), jax.eval_shape(layout.local, types)
    own = dataclasses.replace(
        own,
        params=at_use.types(own.params),
        frozen=at_use.types_of_frozen(own.frozen),
        opt_state=CrossShardState(),
        grouped=False,
        per_shard=False,
    )

    def value(params: Any, state: Any, batch: Any) -> Any:
        state = dataclasses.replace(state, params=params)
        with shard_context(shards, axis_name=() if is_whole else config.axes):
            keys = loss._keys(state, batch, 0, 0)
            found = loss.run(state, (params, state.frozen), batch, keys).loss
        return found.value() if isinstance(found, Mean) else found

    if not is_whole:
        everywhere: Any = PartitionSpec()
        value = _jax.shard_map(
            value,
            mesh=config.mesh,
            axis_names=frozenset(config.axes),
            in_specs=(everywhere,) * 3,
            out_specs=everywhere,
        )

    def count(jaxpr: Any, *, again: bool) -> Products:
        params, others = jax.tree.leaves(own.params), jax.tree.leaves((own, piece))
        run = lambda params, others: jaxpr_as_fun(jaxpr)(*params, *others)[0]
        both = jax.make_jaxpr(jax.value_and_grad(run))(params, others)
        # The body of ``shard_map`` counts once for each shard.
        found = products(_jax.without_unread(both), again=again)
        return found.times(number // shards)

    with _mesh.in_place_of_the_users_mesh(config.mesh):
        traced = jax.make_jaxpr(value)(own.params, own, piece)
        model, hardware = count(without_checkpoints(traced), again=False), count(traced, again=True)
    # Rows of padding are computed, but nobody asked for them.
    own_rows = model.flops * rows // loss.number_of_rows(batch)
    return dataclasses.replace(model, flops=own_rows), hardware
