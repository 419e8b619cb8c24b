"""Microbatches: the mean gradient of a shard's rows, computed in several pieces in one program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.pipeline.stages.accumulate import add, mean, zeros


class LocalResult(NamedTuple):
    """What one shard computes from its rows.

    Attributes:
      loss: float[], the mean loss.
      values: its gradient.
      weight: float[], the weight of the rows; ``None`` if all shards count the same.
      model_state: the model state after the loss.
      aux: what else the loss returned.
    """

    loss: Any
    values: Any
    weight: Any
    model_state: Any
    aux: Any


def over_microbatches(
    number: int,
    compute: Callable[[Any, Any, Any], LocalResult],
    params: Any,
    model_state: Any,
    batch: Any,
) -> tuple[LocalResult, Any, Any]:
    """The mean over ``number`` microbatches, which are computed one after the other.

    Args:
      number: the number of microbatches.
      compute: ``compute(rows, model_state, index)``, for the rows of one microbatch.
      params: the parameters, whose shapes the gradients have.
      model_state: the model state before the first microbatch.
      batch: one shard's rows of the batch.

    Returns:
      The means, weighted if there are weights, gradients with at least 32 bits, and the last model
      state; then ``aux`` and the weight of every microbatch, stacked.
    """
    # The rows divide, or they would not have been placed.
    split = lambda rows: rows.reshape(number, rows.shape[0] // number, *rows.shape[1:])
    pieces = jax.tree.map(split, batch)

    def one(carry: Any, piece: Any) -> tuple[Any, Any]:
        sums, model_state = carry
        index, rows = piece
        found = compute(rows, model_state, index)
        sums = add(sums, found.values, found.loss, found.weight)
        # Dtypes as they were stored, or the carry would change its type.
        as_stored = lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype)
        after = jax.tree.map(as_stored, found.model_state, model_state)
        return (sums, after), (found.aux, found.weight)

    (sums, model_state), (aux, weights) = lax.scan(
        one, (zeros(params), model_state), (jnp.arange(number), pieces)
    )
    values, loss = mean(sums)
    total = None if weights is None else sums[2]
    return LocalResult(loss, values, total, model_state, None), aux, weights
