"""Virtual shards: parts of the batch that each shard computes one after the other, added in order.

What a step computes must not depend on how many of them a shard has: XLA is to compile the same
operations together for any number of shards, so that what it contracts and rounds is the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.collectives.in_order import (
    levels_within,
    no_sums,
    nodes_of,
    nodes_within,
    with_summand,
)
from crossshard.errors import ArgumentError
from crossshard.model.state import TrainState
from crossshard.pipeline.means import to_average
from crossshard.step.microbatches import LocalResult


class Computed(NamedTuple):
    """What is computed of one virtual shard.

    Attributes:
      local: its loss and gradients.
      sums: what else the aggregate is to sum, weighed, by name.
    """

    local: LocalResult
    sums: dict[str, Any]


def unknown_to_xla(state: TrainState) -> jax.Array:
    """bool[]: false, which XLA does not know, so that it keeps a loop that depends on it."""
    return state.step < 0


def check_divides(rows: int, count: int, microbatches: int) -> None:
    """Raise unless a shard's rows can be cut into ``count`` virtual shards.

    Raises:
      ArgumentError: they do not divide.
    """
    if rows % (count * microbatches):
        of = f" of {microbatches} microbatches each" if microbatches > 1 else ""
        raise ArgumentError(
            f"A shard has {rows} rows of this batch, which do not divide over its {count} virtual "
            f"shards{of}. Pass a multiple of {count * microbatches} rows for each shard."
        )


def over_virtual_shards(
    count: int,
    compute: Callable[[Any, Any, Any], Computed],
    pieces: Any,
    given: Any,
    state: TrainState,
    unread: tuple[bool, ...],
) -> LocalResult:
    """The weighed partial sums over ``count`` virtual shards, computed one after the other.

    Args:
      count: how many a shard has.
      compute: what computes one, from its index on this shard, its rows and what is given.
      pieces: the rows of all of them, stacked.
      given: what else the computation reads.
      state: the state of this shard.
      unread: for each gradient whether it is zero, and not to be summed; empty if none is.
    """
    tree: Any = None
    of_values: list[int] = []

    def one(index: Any, rows: Any, given: Any) -> tuple[list[jax.Array], Any]:
        nonlocal tree, of_values
        local, sums = compute(index, rows, given)
        values, of_params = jax.tree.flatten(local.values)
        of_values = [i for i in range(len(values)) if not (unread and unread[i])]
        weigh = lambda x: to_average(x, local.weight)
        summands = [weigh(values[i]) for i in of_values], weigh(local.loss), local.weight, sums
        leaves, structure = jax.tree.flatten(summands)
        tree = structure, of_params, [x.shape for x in values], [x.dtype for x in values]
        return leaves, (local.model_state, local.aux)

    types, (_, aux) = jax.eval_shape(one, jnp.int32(0), jax.tree.map(lambda x: x[0], pieces), given)
    never = unknown_to_xla(state).astype(jnp.int32)
    levels = levels_within(count) + never

    def turn(carry: Any) -> Any:
        index, sums, _, kept = carry
        rows = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), pieces)
        # Or XLA would compute before the loop what is the same in all turns, such as all of a
        # single one.
        index, rows, own = lax.optimization_barrier((index, rows, given))
        leaves, (model_state, aux) = one(index, rows, own)
        put = lambda x, new: lax.dynamic_update_index_in_dim(x, jnp.asarray(new), index, 0)
        kept = jax.tree.map(put, kept, aux)
        return index + 1, with_summand(sums, leaves, index, levels), model_state, kept

    kept = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), aux)
    before = jnp.int32(0), no_sums(types, count), state.model_state, kept
    is_left = lambda carry: carry[0] < count + never
    _, sums, model_state, aux = lax.while_loop(is_left, turn, before)
    structure, of_params, shapes, dtypes = tree
    summed, loss, weight, others = structure.unflatten(nodes_of(sums, count))
    found = dict(zip(of_values, summed, strict=True))
    values = [
        found[i] if i in found else jnp.zeros((nodes_within(count), *shape), dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    return LocalResult(loss, of_params.unflatten(values), weight, model_state, aux, (), others)
