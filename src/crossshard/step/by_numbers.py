"""By numbers: whether a loss of two shards' rows is the mean of these shards' losses."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from crossshard import _jax
from crossshard.gradients.scalars import is_inexact
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.batch_axes import join, take_rows
from crossshard.step.config import StepConfig
from crossshard.step.microbatches import LocalResult
from crossshard.step.over_rows import Doubt, not_by_numbers
from crossshard.step.step_function import to_read

# Sums over rows in another order differ by less, in float32.
_TOLERANCE = 1e-4


def check_by_numbers(
    config: StepConfig, layout: StateLayout, state: TrainState, batch: Any, doubt: Doubt
) -> None:
    """Raise unless numbers show that the loss is a mean over rows, which its trace does not.

    Each shard computes the loss, and its gradient, of half of its rows, of half of the next
    shard's, and of both together, as many as in the step. Noise is switched off. If there are
    several processes, all of them make this call.

    Args:
      config: the step.
      layout: the layout of the state.
      state: the state, which stays valid.
      batch: the batch, on the devices.
      doubt: what its trace does not decide.

    Raises:
      LossError: the loss is no mean over rows.
    """
    loss, shards, groups = config.loss, layout.shards, layout.groups
    at_use = to_read(layout, state)
    together = [list(range(shards.number))] if groups is None else groups.groups
    pairs = (zip(each, [*each[1:], each[0]], strict=True) for each in together)
    to_next = list(itertools.chain.from_iterable(pairs))

    def on_shard(state: TrainState, batch: Any) -> Any:
        before, (rows, whole) = layout.local(state), loss.split(batch)
        half = max(1, loss.number_of_rows(batch) // loss.accumulate_steps // 2)
        of = lambda part: loss.batch_axes.map(lambda x, axis: take_rows(x, axis, part), rows)
        one = of(slice(half))
        if len(together[0]) > 1:
            other = jax.tree.map(lambda x: lax.ppermute(x, shards.axes, to_next), one)
        else:
            other = of(slice(half, 2 * half))
        concatenated = lambda axis, *x: jnp.concatenate(x, axis)
        both = jax.tree.map(concatenated, loss.batch_axes.tree_of(rows), one, other)
        found = [
            loss.quiet_gradient(before, join(each, whole), at_use) for each in (one, other, both)
        ]
        return jnp.stack(_compared(found))[None]

    each = PartitionSpec(layout.axes)
    run = jax.shard_map(
        on_shard,
        mesh=layout.mesh,
        axis_names=frozenset(layout.axes),
        in_specs=(layout.specs(state), loss.batch_axes.specs(batch, layout.axes)),
        out_specs=each,
        check_vma=False,
    )
    everywhere = jax.NamedSharding(layout.mesh, PartitionSpec())
    given = jax.tree.map(lambda x: _jax.on_mesh(x, layout.mesh), (state, batch))
    with _jax.in_place_of_the_users_mesh(layout.mesh):
        found = np.asarray(jax.jit(run, out_shardings=everywhere)(*given))
    values, gradients, both, mean = found[np.argmax(np.nan_to_num(found[:, :2]).max(1))]
    if max(values, gradients) > _tolerance(state, batch):
        raise not_by_numbers(doubt, both, mean, gradients)


def _compared(found: Sequence[LocalResult]) -> list[jax.Array]:
    """How far the loss and the gradient of rows together are from the means; and both losses."""
    of = [jnp.float32(1) if each.weight is None else each.weight for each in found]
    total = of[0] + of[1]
    divided = lambda x: x / jnp.where(total == 0, 1, total)
    losses = [jnp.asarray(each.loss, jnp.float32) for each in found]
    mean = divided(of[0] * losses[0] + of[1] * losses[1])
    off = _relative(losses[2] - mean, losses[2], mean)
    early = found[2].early or (False,) * len(jax.tree.leaves(found[2].values))
    weighted = found[2].weight is not None
    pieces = []
    leaves = zip(early, *(jax.tree.leaves(each.values) for each in found), strict=True)
    for is_early, one, other, both in leaves:
        if is_early and weighted:
            # The sums of all shards, which have their weights already.
            pieces.append((both - one - other, one, other, both))
        else:
            pieces.append((both - divided(of[0] * one + of[1] * other), one, other, both))
    norms = [optax.tree.norm(list(each)) for each in zip(*pieces, strict=True)]
    return [off, _relative(*norms), losses[2], mean]


def _relative(difference: Any, *values: Any) -> jax.Array:
    largest = functools.reduce(jnp.maximum, map(jnp.abs, values))
    return jnp.where(difference == 0, 0, jnp.abs(difference) / largest).astype(jnp.float32)


def _tolerance(*trees: Any) -> float:
    """Up to which relative difference two losses are equal."""
    dtypes = [x.dtype for x in jax.tree.leaves(trees) if is_inexact(x)]
    return max(_TOLERANCE, *(4 * float(jnp.finfo(dtype).eps) for dtype in dtypes))
