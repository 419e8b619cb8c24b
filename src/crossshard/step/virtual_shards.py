"""Virtual shards: parts of the batch that each shard computes one after the other, added in order.

What a step computes must not depend on how many of them a shard has: XLA is to compile the same
operations together for any number of shards, so that what it contracts and rounds is the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard import _check, _jax
from crossshard.collectives.in_order import (
    levels_within,
    no_sums,
    nodes_of,
    nodes_within,
    with_summand,
)
from crossshard.errors import ArgumentError, AxisError
from crossshard.jaxprs.repeats import without_repeats
from crossshard.jaxprs.walk import equations_of
from crossshard.model.state import TrainState
from crossshard.pipeline.means import to_average
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stages.metrics import need_local
from crossshard.step.at_use import AtUse
from crossshard.step.microbatches import LocalResult

# ---- What is refused.


def check_virtual_shards(
    given: Any,
    pipeline: Pipeline,
    shards: int,
    *,
    other_axes: Sequence[str],
    loss_over: str,
    model_state: str | None,
    gather_dtype: Any,
) -> int | None:
    """The checked number of virtual shards; ``None`` without them.

    Args:
      given: the ``virtual_shards`` option.
      pipeline: the pipeline of the step.
      shards: the number of shards.
      other_axes: the other axes of the mesh.
      loss_over: the step's arguments, like ``model_state`` and ``gather_dtype``.

    Raises:
      ArgumentError: the shards do not divide them, or another option that rules them out.
      ArgumentTypeError: it is no int.
    """
    if given is None:
        return None
    number = _check.whole_number("virtual_shards", given)
    if number % shards:
        raise ArgumentError(
            f"virtual_shards={number} are divided evenly over the shards, and there are {shards}. "
            f"Pass a multiple of {shards}, or as num_shards one of "
            f"{', '.join(str(n) for n in range(1, number + 1) if number % n == 0)}."
        )
    local = [name for name in pipeline.metrics if need_local((name,))]
    dtype, nonfinite = pipeline.reduce_dtype, pipeline.nonfinite
    refused = (
        (
            loss_over == "batch",
            "loss_over='batch' is one loss of all rows, whose work XLA splits in another way for "
            "each number of shards",
            "Write loss_over='rows'.",
        ),
        (
            pipeline.joins_groups,
            "sync_every lets each worker train alone, and there are as many as shards or groups",
            "Leave one of them out.",
        ),
        (
            pipeline.groups is not None,
            f"group_assignment {pipeline.groups} gives each group of shards parameters of its own",
            "Leave one of them out.",
        ),
        (
            pipeline.aggregator is not None,
            f"The gradients would be summed {pipeline.sums_by.describe()}, of what each shard has",
            "Leave aggregator and reduce_dtype out.",
        ),
        (
            dtype is not None,
            f"reduce_dtype={str(dtype)!r} rounds what each shard sends, which is more of the sum "
            f"if there are fewer shards",
            "Leave one of them out.",
        ),
        (
            gather_dtype is not None,
            f"gather_dtype={str(gather_dtype)!r} rounds the parameters that several shards send",
            "Leave one of them out; the loss may convert them to 16 bits itself.",
        ),
        (
            pipeline.preprocess is not None,
            "preprocess= runs on each shard's own gradient, with a state for each shard",
            "Put it before the optimizer: optax.chain(preprocess, optimizer) gets the mean.",
        ),
        (
            nonfinite is not None and nonfinite.excludes_shards,
            "nonfinite='quarantine' leaves a shard out, and so more of the batch if there are "
            "fewer shards",
            "Write nonfinite='skip'.",
        ),
        (
            bool(local),
            f"metrics has {', '.join(map(repr, local))}, of each shard's own gradient",
            "Leave it out.",
        ),
        (
            model_state == "per_shard",
            "model_state='per_shard' keeps one state for each shard",
            "Write model_state='mean'.",
        ),
        (
            bool(other_axes),
            f"The mesh has other axes, {', '.join(other_axes)}, over which XLA splits the work of "
            f"each shard, and adds what it likes",
            "Pass a mesh of the shards alone.",
        ),
    )
    for is_asked, what, instead in refused:
        if is_asked:
            raise ArgumentError(
                f"{what}; with virtual_shards={number} the parameters are not to depend on the "
                f"number of shards. {instead}"
            )
    return number


def check_state_is_shared(state: TrainState) -> None:
    """Raise if each shard has model state of its own.

    Raises:
      ArgumentError: it has.
    """
    if state.per_shard:
        raise ArgumentError(
            "Each shard keeps its own variables of this module, such as statistics or random "
            "streams; with virtual_shards the parameters are not to depend on the number of "
            "shards. Write the loss as a function with model_state='mean', and take random "
            "numbers from its argument rng."
        )


def check_rows_divide(rows: int, count: int, microbatches: int) -> None:
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


def _check_alone(jaxpr: Any, axes: Sequence[str]) -> None:
    """Raise if the loss of a virtual shard communicates with other shards."""
    for equation in equations_of(jaxpr):
        if not _jax.names_axes(equation):
            continue
        named = set(jax.tree.leaves(_jax.named_axes(equation))).intersection(axes)
        if named:
            where = _jax.source_of(equation)
            raise AxisError(
                f"The loss names the shard axis {named.pop()!r}{f' ({where})' if where else ''}; "
                f"with virtual_shards its value is not to depend on the number of shards. Leave "
                f"pmean, all_gather and axis_index out."
            )


# ---- What is computed.


def unknown_to_xla(state: TrainState) -> jax.Array:
    """bool[]: false, which XLA does not know, so that it keeps a loop that depends on it."""
    return state.step < 0


def over_virtual_shards(
    count: int,
    compute: Callable[[Any, Any, Any], tuple[LocalResult, dict[str, Any]]],
    pieces: Any,
    given: Any,
    state: TrainState,
    at_use: AtUse,
) -> LocalResult:
    """The weighed partial sums over ``count`` virtual shards, computed one after the other.

    Args:
      count: how many this shard has.
      compute: what computes one, from its index on this shard, its rows and what is given: its
        loss and gradients, and what else is to be summed, weighed.
      pieces: the rows of all of them, stacked.
      given: what else the computation reads.
      state: the state of this shard.
      at_use: how the loss gets its parameters.

    Raises:
      AxisError: the loss communicates with other shards.
    """

    params, structure = jax.tree.flatten(state.params)
    unread = at_use.unread or (False,) * len(params)

    def one(index: Any, rows: Any, given: Any) -> tuple[Any, Any, Any]:
        local, sums = compute(index, rows, given)
        weigh = lambda x: to_average(x, local.weight)
        values = zip(jax.tree.leaves(local.values), unread, strict=True)
        read = [weigh(x) for x, is_unread in values if not is_unread]
        return (read, weigh(local.loss), local.weight, sums), local.model_state, local.aux

    nth = lambda index: jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), pieces
    )
    first = jnp.int32(0)
    jaxpr, types = jax.make_jaxpr(one, return_shape=True)(first, nth(first), given)
    jaxpr = without_repeats(_jax.without_unread(jaxpr))
    _check_alone(jaxpr, at_use.shards.axes)
    run, tree = _jax.as_function(jaxpr), jax.tree.structure(types)
    to_sum, of_sums = jax.tree.flatten(types[0])
    never = unknown_to_xla(state).astype(jnp.int32)
    levels = levels_within(count) + never

    def turn(carry: Any) -> Any:
        index, sums, _, every = carry
        # Or XLA would compute before the loop what is the same in all turns, as all of it is if
        # there is only one.
        index, rows, own = lax.optimization_barrier((index, nth(index), given))
        summands, model_state, aux = tree.unflatten(run(*jax.tree.leaves((index, rows, own))))
        put = lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0)
        every = jax.tree.map(put, every, aux)
        sums = with_summand(sums, jax.tree.leaves(summands), index, levels)
        return index + 1, sums, model_state, every

    every = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), types[2])
    before = first, no_sums(to_sum, count), state.model_state, every
    is_left = lambda carry: carry[0] < count + never
    _, sums, model_state, aux = lax.while_loop(is_left, turn, before)
    read, loss, weight, others = of_sums.unflatten(nodes_of(sums, count))
    found = iter(read)
    shape = lambda x: (nodes_within(count), *jnp.shape(x))
    values = [
        jnp.zeros(shape(x), x.dtype) if is_unread else next(found)
        for x, is_unread in zip(params, unread, strict=True)
    ]
    summed = structure.unflatten(values)
    return LocalResult(loss, summed, weight, model_state, aux, sums=others)
