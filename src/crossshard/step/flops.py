"""Flops: the floating-point operations of a step's loss and gradient, as its jaxprs have them."""

import dataclasses
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from crossshard import _check, _jax, _mesh
from crossshard._annotations import PyTree
from crossshard.errors import ArgumentTypeError
from crossshard.gradients.mean import Mean
from crossshard.jaxprs.products import products
from crossshard.jaxprs.rewrite import without_checkpoints
from crossshard.pipeline.stage import CrossShardState
from crossshard.shards.axes import shard_context
from crossshard.shards.batch_axes import resized
from crossshard.step.function import to_read
from crossshard.step.losses.loss import LossOver
from crossshard.step.train_step import TrainStep, config_of, latest_of, placer_of


@dataclasses.dataclass(frozen=True)
class Flops:
    """The floating-point operations of a step.

    >>> Flops(6_000, 8_000).uncounted
    ()

    Attributes:
      model: those on the rows of a batch, each product once: what MFU counts.
      hardware: with what ``jax.checkpoint`` computes again, and with rows that only fill shards up:
        what HFU counts.
      uncounted: operations that may have more, such as kernels, each with its line.
    """

    model: int
    hardware: int
    uncounted: tuple[str, ...] = ()


def check_is_step(step: object) -> None:
    """Raise ArgumentTypeError unless this is a step."""
    if not isinstance(step, TrainStep):
        raise ArgumentTypeError(
            f"step must be what make_train_step returns; got {_check.described(step)}."
        )


def number_of_rows(step: TrainStep, batch: PyTree) -> int:
    """Return the rows of a call of all processes, of whose shards all are taken to have as many."""
    return placer_of(step).number_of_rows(batch)


def count_flops(step: TrainStep, batch: PyTree) -> Flops:
    """Count the floating-point operations of a step's loss and gradient, on all shards.

    Counted are matrix products, convolutions, cuDNN's attention and kernels with a
    ``cost_estimate``; a multiplication and an addition are two. A scan counts with every turn, of
    branches the largest. Elementwise operations, decompositions and the optimizer are left out.

    Args:
      step: a step whose ``init`` or ``abstract_init`` has been called.
      batch: the batch of a call, as arrays or types.

    Raises:
      ArgumentError, ArgumentTypeError: not a step, no ``init``, or a batch that cannot be split.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: ((x @ w) ** 2).mean(), optax.sgd(0.1), num_shards=1)
    >>> state = step.init(jnp.zeros((16, 4)))
    >>> count_flops(step, jnp.zeros((8, 16))).model  # 2 · 8 · 16 · 4, and as many for w's gradient
    2048
    """
    check_is_step(step)
    config, (layout, types) = config_of(step), latest_of(step)
    loss, rows = config.loss, number_of_rows(step, batch)
    batch = placer_of(step).abstract(batch)
    is_whole = loss.over is LossOver.BATCH
    shards = 1 if is_whole else config.number_of_shards
    # Shards have room for ``pieces``; where virtual shards do not divide, some are skipped.
    pieces = loss.accumulate_steps if is_whole else shards * loss.pieces(shards)
    computed = loss.accumulate_steps * (1 if is_whole else loss.parts(shards))

    def of_piece(x: Any, axis: int | None) -> Any:
        number = 0 if axis is None else x.shape[axis] // pieces
        return jax.ShapeDtypeStruct(resized(x.shape, axis, number), x.dtype)

    leaves, tree = jax.tree.flatten(batch)
    piece = tree.unflatten(map(of_piece, leaves, loss.batch_axes.of(batch)))
    at_use, own = to_read(layout, types), jax.eval_shape(layout.local, types)
    params, frozen = at_use.types(own.params), at_use.types_of_frozen(own.frozen)
    own = dataclasses.replace(own, params=params, frozen=frozen, opt_state=CrossShardState())

    def value(params: Any, state: Any, batch: Any) -> Any:
        with shard_context(shards, axis_name=() if is_whole else config.axes):
            keys = loss.keys(state, batch, 0, 0)
            found = loss.run(state, (params, state.frozen), batch, keys).loss
        return found.value() if isinstance(found, Mean) else found

    if not is_whole:
        spec: Any = PartitionSpec()
        where = {"mesh": config.mesh, "axis_names": frozenset(config.axes)}
        value = _jax.shard_map(value, in_specs=(spec, spec, spec), out_specs=spec, **where)

    uncounted: set[str] = set()

    def count(jaxpr: Any) -> int:
        trained, others = jax.tree.leaves(params), jax.tree.leaves((own, piece))
        run = lambda trained, others: jaxpr_as_fun(jaxpr)(*trained, *others)[0]
        both = jax.make_jaxpr(jax.value_and_grad(run))(trained, others)
        # The body of ``shard_map`` counts once for each shard.
        return products(_jax.without_unread(both), uncounted) * computed // shards

    with _mesh.in_place_of_the_users_mesh(config.mesh):
        traced = jax.make_jaxpr(value)(params, own, piece)
        model, hardware = count(without_checkpoints(traced)), count(traced)
    # Rows that fill shards up are computed, but nobody asked for them.
    asked = model * rows // (loss.number_of_rows(batch) // pieces * computed)
    return Flops(asked, hardware, tuple(sorted(uncounted)))
