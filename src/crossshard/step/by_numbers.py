"""By numbers: whether a loss of two shards' rows is the mean of these shards' losses."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from crossshard.gradients.scalars import is_inexact
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.step.config import StepConfig
from crossshard.step.entries import join_entries, specs_of
from crossshard.step.over_rows import UndecidedError, not_by_numbers
from crossshard.step.step_function import to_read

# Float32 sums over rows in another order differ by less.
_TOLERANCE = 1e-4


def check_by_numbers(
    config: StepConfig,
    layout: StateLayout,
    state: TrainState,
    batch: Any,
    error: UndecidedError,
) -> None:
    """Raise unless numbers show that the loss is a mean over rows, which its trace does not.

    Each shard computes the loss of its own rows, or of its first microbatch, and that of these and
    the next shard's together. Noise is switched off. If there are several processes, all of them
    make this call.

    Args:
      config: the step.
      layout: the layout of the state.
      state: the state, which stays valid.
      batch: the batch, on the devices.
      error: what is not decided.

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
        of = jax.tree.leaves(rows)[0].shape[0] // loss.accumulate_steps
        own = jax.tree.map(lambda x: x[:of], rows)
        if len(together[0]) > 1:
            other = jax.tree.map(lambda x: lax.ppermute(x, shards.axes, to_next), own)
        else:
            other = jax.tree.map(lambda x: x[of : 2 * of], rows)
        both = jax.tree.map(lambda *x: jnp.concatenate(x), own, other)
        values, weights = zip(
            *[
                loss.quiet_loss(before, join_entries(each, whole), at_use)
                for each in (own, other, both)
            ],
            strict=True,
        )
        one, another, found = (jnp.asarray(x, jnp.float32) for x in values)
        total = weights[0] + weights[1]
        mean = (weights[0] * one + weights[1] * another) / jnp.where(total == 0, 1, total)
        off = jnp.abs(found - mean) / jnp.maximum(jnp.abs(found), jnp.abs(mean))
        return jnp.stack([jnp.where(found == mean, 0, off), found, mean])[None]

    each = PartitionSpec(layout.axes)
    run = jax.shard_map(
        on_shard,
        mesh=layout.mesh,
        axis_names=frozenset(layout.axes),
        in_specs=(layout.specs(state), specs_of(batch, loss.replicated_entries, each)),
        out_specs=each,
        check_vma=False,
    )
    everywhere = jax.NamedSharding(layout.mesh, PartitionSpec())
    found = np.asarray(jax.jit(run, out_shardings=everywhere)(state, batch))
    off, both, mean = found[np.argmax(np.where(np.isfinite(found[:, 0]), found[:, 0], -1))]
    if off > _tolerance(state, batch):
        raise not_by_numbers(error.finding, both, mean)


def _tolerance(*trees: Any) -> float:
    """Up to which relative difference two losses are equal."""
    dtypes = [x.dtype for x in jax.tree.leaves(trees) if is_inexact(x)]
    return max(_TOLERANCE, *(4 * float(jnp.finfo(dtype).eps) for dtype in dtypes))
