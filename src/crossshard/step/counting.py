"""Counting: what the whole batch counts in a ``Mean``, before the backward pass of its parts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard import _jax
from crossshard.collectives.sums import sum_over_shards
from crossshard.errors import ArgumentError
from crossshard.gradients.mean import Mean, counts_of, part_of_mean
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment, size_of_group

# The counts of each term, and the model state after the rows that have them, of the rows of one
# piece, given the model state before and the index of the microbatch.
CountOfPiece = Callable[[Any, Any, Any], tuple[tuple[Any, ...], Any]]


@dataclasses.dataclass(frozen=True)
class Counting:
    """How the counts of a ``Mean`` are summed over the parts of the batch.

    Attributes:
      shards: the shards that have them.
      groups: the groups that reduce independently; ``None`` for all shards.
      pieces: how many parts each shard has.
      weight: float[], 0 if this shard is left out, else 1; ``None`` if none is.
      counts: float[] of each term, of the whole batch; ``None`` if each shard has one part, which
        sums them where they are computed.
    """

    shards: Shards
    groups: GroupAssignment | None
    pieces: int
    weight: Any = None
    counts: tuple[Any, ...] | None = None

    def part(self, mean: Mean) -> jax.Array:
        """The loss of one part, so that the mean of the parts' losses is that of the batch."""
        counts = self.counts or self.over_shards(jnp.stack(counts_of(mean)))
        parts = size_of_group(self.groups, self.shards.number)
        if self.weight is not None:
            parts = sum_over_shards(self.weight, self.shards.within(self.groups))
        return part_of_mean(mean, counts, parts * self.pieces)

    def over_shards(self, counts: jax.Array) -> tuple[Any, ...]:
        """The sum of a shard's counts over the shards that are not left out."""
        own = lax.stop_gradient(counts)
        own = own if self.weight is None else jnp.where(self.weight != 0, own, 0)
        return tuple(sum_over_shards(own, self.shards.within(self.groups)))

    def with_counts(self, counts: Any) -> "Counting":
        """The same, where the counts are known."""
        return dataclasses.replace(self, counts=counts)

    def in_order(self, counts: jax.Array) -> tuple[Any, ...]:
        """The sum over virtual shards, ``[of this shard, terms]``, the same for any number."""
        each = len(counts)
        every = jnp.zeros((self.shards.number, *counts.shape), counts.dtype)
        every = sum_over_shards(every.at[self.shards.index()].set(counts), self.shards)
        rows = list(every.reshape(self.shards.number * each, -1))
        while len(rows) > 1:
            odd = rows[len(rows) // 2 * 2 :]
            pairs = zip(rows[::2], rows[1::2], strict=False)
            rows = [one + other for one, other in pairs] + odd
        return tuple(rows[0])


def counts_of_pieces(count: CountOfPiece, number: int, pieces: Any, model_state: Any) -> jax.Array:
    """float[terms]: what the microbatches of a shard, or of a virtual one, count together.

    Args:
      count: computes the counts of one.
      number: how many there are.
      pieces: their rows, stacked.
      model_state: the state before the first.
    """

    def one(before: Any, piece: Any) -> tuple[Any, Any]:
        counts, after = count(piece[1], before, piece[0])
        as_stored = jax.tree.map(lambda x, y: x.astype(y.dtype), after, before)
        return as_stored, jnp.stack(counts)

    return lax.scan(one, model_state, (jnp.arange(number), pieces))[1].sum(0)


def pruned(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, computed without what it does not need for that."""
    jaxpr, types = jax.make_jaxpr(function, return_shape=True)(*args)
    run = _jax.as_function(_jax.without_unread(jaxpr))
    return jax.tree.unflatten(jax.tree.structure(types), run(*jax.tree.leaves(args)))


def check_takes_mean(*, weight: Any, is_summed: bool) -> None:
    """Raise if a loss that returns a ``Mean`` contradicts the step.

    Raises:
      ArgumentError: it does.
    """
    if weight is not None:
        raise ArgumentError(
            "The loss returns a Mean, which says what its rows count, and weight= says it again. "
            "Leave weight out."
        )
    if is_summed:
        raise ArgumentError(
            "The loss returns a Mean, which is a mean over the whole batch, and the optimizer's "
            "reduction is SUM, which adds up the losses of shards. Use reduction='mean'."
        )
