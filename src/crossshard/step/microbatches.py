"""Microbatches: the mean gradient of a shard's rows, computed in several pieces in one program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.gradients.mean import MeanSums
from crossshard.pipeline.stages.accumulate import Sums, add, mean
from crossshard.shards.batch_axes import BatchAxes


class LocalResult(NamedTuple):
    """What one shard computes from its rows.

    Attributes:
      loss: float[], the mean loss.
      values: its gradient.
      weight: float[], the weight of the rows; ``None`` if all shards count the same.
      model_state: the model state after the loss.
      aux: what else the loss returned.
      terms: the sums and counts of a ``Mean``; ``None`` if the loss is a number.
      early: for each leaf of the gradient whether the backward pass has summed it over the shards;
        empty if none is. See ``Gradients``.
      sums: what else the aggregate is to sum, by name, of virtual shards: loss, values, weight and
        these are then their weighed partial sums, ``[nodes, …]``, and aux is ``[virtual, …]``.
        ``None`` without them.
    """

    loss: Any
    values: Any
    weight: Any
    model_state: Any
    aux: Any
    terms: MeanSums | None = None
    early: tuple[bool, ...] = ()
    sums: dict[str, Any] | None = None


# Computes the gradient of one microbatch from its rows, the model state and its index.
Compute = Callable[[Any, Any, Any], LocalResult]


def pieces_of(rows: Any, axes: BatchAxes, number: int, *, interleaved: bool = False) -> Any:
    """The rows of ``number`` microbatches, stacked: ``[number, …]`` in the place of each array.

    Args:
      rows: a batch without its whole arrays.
      axes: along which axes its rows are.
      number: the number of microbatches, which divides that of the rows.
      interleaved: whether the rows are those of all shards, of which a microbatch then has every
        ``number``-th: so many of each shard's, whatever the number of shards.
    """

    def one(x: Any, axis: int) -> Any:
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        each = x.shape[axis] // number
        if interleaved:
            return jnp.moveaxis(x.reshape(*before, each, number, *after), axis + 1, 0)
        return jnp.moveaxis(x.reshape(*before, number, each, *after), axis, 0)

    return jax.tree.map(one, rows, axes.tree_of(rows))


def over_microbatches(
    number: int,
    compute: Compute,
    zero: Sums,
    early: tuple[bool, ...],
    model_state: Any,
    pieces: Any,
    last: Callable[[Sums], Compute] | None = None,
) -> tuple[LocalResult, Any, Any]:
    """The mean over ``number`` microbatches, which are computed one after the other.

    Args:
      number: the number of microbatches.
      compute: what computes one.
      zero: the sums before the first.
      early: for each leaf of the gradient whether each microbatch sums it over the shards; empty if
        none does.
      model_state: the model state before the first microbatch.
      pieces: the rows of the microbatches, stacked; see ``pieces_of``.
      last: from the sums of all microbatches but the last, what computes that. It returns the mean
        of all in the gradients that it has summed over the shards. ``None`` if it is as the others.

    Returns:
      The means, weighted if there are weights, gradients with at least 32 bits, and the last model
      state; then ``aux`` and the weight of every microbatch, stacked.
    """
    pieces = jnp.arange(number), pieces

    def one(carry: Any, piece: Any) -> tuple[Any, Any]:
        sums, model_state = carry
        index, rows = piece
        found = compute(rows, model_state, index)
        sums = add(sums, found.values, found.loss, found.weight, early)
        others = found.aux, found.terms, found.weight
        return (sums, _as_stored(found.model_state, model_state)), others

    if last is None:
        (sums, model_state), (aux, terms, weights) = lax.scan(one, (zero, model_state), pieces)
        values, loss = mean(sums, early, weighted=weights is not None)
    else:
        but_last = jax.tree.map(lambda x: x[:-1], pieces)
        (sums, model_state), others = lax.scan(one, (zero, model_state), but_last)
        index, rows = jax.tree.map(lambda x: x[-1], pieces)
        found = last(sums)(rows, model_state, index)
        early = found.early
        own = _chosen(early, jax.tree.map(jnp.zeros_like, sums[0]), found.values)
        sums = add(sums, own, found.loss, found.weight)
        values, loss = mean(sums)
        values = _chosen(early, found.values, values)
        model_state = _as_stored(found.model_state, model_state)
        join = lambda first, end: jnp.concatenate([first, jnp.asarray(end)[None]])
        own = found.aux, found.terms, found.weight
        aux, terms, weights = jax.tree.map(join, others, own)
    total = None if weights is None else sums[2]
    terms = jax.tree.map(lambda x: x.sum(0), terms)
    return LocalResult(loss, values, total, model_state, None, terms, early), aux, weights


def _as_stored(after: Any, before: Any) -> Any:
    """A state in the dtypes of the one before, or the carry would change its type."""
    return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), after, before)


def _chosen(flags: Sequence[bool], if_set: Any, otherwise: Any) -> Any:
    """A pytree with the leaves of one where the flag is set, and else of the other."""
    if not flags:
        return otherwise
    leaves, tree = jax.tree.flatten(otherwise)
    every = zip(flags, jax.tree.leaves(if_set), leaves, strict=True)
    return tree.unflatten([one if flag else other for flag, one, other in every])
