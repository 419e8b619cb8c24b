"""Plan: how the weight update is computed, and how it is sharded (ZeRO-1).

Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training"
(arXiv 2004.13336).
"""

import contextlib
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from crossshard import _check, _jax
from crossshard.errors import ArgumentError, CrossshardError, WeightUpdateError
from crossshard.gradients.nesting import inside_optimizer
from crossshard.jaxprs.leafwise import NotLeafwise
from crossshard.jaxprs.slices import is_elementwise, why_not_elementwise
from crossshard.pipeline.update.deal import deal, is_lopsided
from crossshard.pipeline.update.dealt import Dealt
from crossshard.pipeline.update.optimize import takes_value
from crossshard.pipeline.update.unread import Unread, find_unread
from crossshard.shards.model_axes import other_axes_like
from crossshard.shards.partition import (
    ANY,
    WHOLE,
    Partition,
    TileShape,
    map_partitions,
    partition_along_axis,
    partition_for,
)


class WeightUpdate(enum.StrEnum):
    """Where the weights are updated.

    REPLICATED: every shard updates all weights and has the full optimizer state.
    SHARDED: every shard updates its slice and has its slice of the optimizer state.
    AUTO: sharded if the optimizer updates each parameter from its own arrays and from scalars, and
      the parameters are large enough, else replicated.
    """

    AUTO = "auto"
    REPLICATED = "replicated"
    SHARDED = "sharded"


def check_weight_update(weight_update: object) -> WeightUpdate:
    """The checked value, or an ArgumentError that lists the values."""
    return _check.choice("weight_update", weight_update, WeightUpdate)


class Rest(enum.StrEnum):
    """Where parameters rest between steps.

    REPLICATED: every shard has all of them.
    SHARDED: every shard has its slice of each, and the update is sharded too.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"


class UpdateStrategy(enum.StrEnum):
    """How an update is computed."""

    WHOLE = "whole on every shard"
    PARTS = "in parts"
    DEALT = "in parts, leaf by leaf"
    GLOBAL = "on sharded global arrays"


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """How the parameters and the optimizer state of one update are split, and why.

    Attributes:
      strategy: how the update is computed.
      why: the reason, in a few words.
      params: the partition of each parameter.
      state: the partition of each array of the optimizer state.
      structure: the tree structure of the optimizer state.
      unread: for each parameter, whether its gradient need be neither computed nor sent.
      in_parts: whether the parameters rest in parts, too.
      dealt: who updates which leaf, if the update runs leaf by leaf.
      alone: the leaves, if every shard updates all of them, each in a program of its own.
    """

    strategy: UpdateStrategy
    why: str
    params: tuple[Partition, ...]
    state: tuple[Partition, ...]
    structure: Any
    unread: tuple[bool, ...] = ()
    in_parts: bool = False
    dealt: Dealt | None = None
    alone: Dealt | None = None


# Below this the two collectives of a sharded update cost more than the split saves.
_WORTH_BYTES = 1 << 19


def plan_update(
    inner: optax.GradientTransformationExtraArgs,
    params: Any,
    number: int,
    wanted: WeightUpdate = WeightUpdate.AUTO,
    *,
    only_parts: bool = False,
    tile: TileShape = ANY,
    leave_unread: bool = False,
    other_axes: Sequence[PartitionSpec] = (),
    in_parts: bool = False,
    sums_in_loops: bool = False,
    virtual_shards: int | None = None,
) -> UpdatePlan:
    """Plan the update of these parameters on ``number`` shards.

    Args:
      inner: the inner optimizer.
      params: a pytree with shapes and dtypes.
      number: the number of shards that share one set of parameters.
      wanted: the requested weight update.
      only_parts: whether only slices are possible, as inside ``shard_map``.
      tile: the smallest slice that the platform scatters efficiently.
      leave_unread: whether gradients that the optimizer does not read may be left out.
      other_axes: for each parameter its spec on other axes; empty if none
        is split over these.
      in_parts: whether the parameters are to rest in parts.
      sums_in_loops: whether gradients of stacked layers are to be summed layer by layer.
      virtual_shards: if the bits of the update must not depend on the number of shards, a multiple
        of it.

    Raises:
      ArgumentError: the optimizer's state changes its structure, or the optimizer needs arguments
        that a step does not have.
      WeightUpdateError: only slices are possible and the optimizer is not elementwise, or the same
        bits are wanted and it does not run leaf by leaf either.
    """
    params = jax.tree.map(_abstract, params)
    with inside_optimizer():
        state = jax.eval_shape(inner.init, params)
    leaves, (arrays, structure) = jax.tree.leaves(params), jax.tree.flatten(state)
    of_params = other_axes or [WHOLE] * len(leaves)
    axes_of_state = other_axes_like(state, params, of_params)
    # One function for all checks: JAX traces it on whole arrays once.
    find = _traced_once(as_updates(inner))
    update = as_function(find)
    _check_state_stays(update, params, state)

    whole_params, whole_state = _unsplit(params, of_params), _unsplit(state, axes_of_state)
    if leave_unread:
        unread = find_unread(update, params, state, _LOSS)
    else:
        unread = Unread((False,) * len(leaves), (False,) * len(leaves), (False,) * len(arrays))

    planned = functools.partial(UpdatePlan, structure=structure, unread=unread.gradients)
    deal_over = functools.partial(deal, find, params, state, [_LOSS], virtual=virtual_shards)
    alone, same_bits = None, virtual_shards is not None
    if same_bits and not _is_elementwise(update, params, state, whole_params, whole_state):
        with contextlib.suppress(NotLeafwise):
            alone = deal_over(whole_params, 1, tile, in_parts=False, sums_in_loops=False)
    whole = lambda why: planned(UpdateStrategy.WHOLE, why, whole_params, whole_state, alone=alone)
    if wanted is WeightUpdate.REPLICATED:
        return whole("as requested")
    if number == 1:
        return whole("there is one shard")
    # Parameters that rest in parts keep their shapes, so that they are split along an axis.
    split_one = partition_along_axis if in_parts else partition_for
    # What is not sent is not gathered either.
    stays = (False,) * len(leaves) if in_parts else unread.still
    partitions = tuple(
        each if still else split_one(each.shape, number, tile, each.other_axes)
        for each, still in zip(whole_params, stays, strict=True)
    )
    to_split = [
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf, partition in zip(leaves, partitions, strict=True)
        if partition.number > 1
    ]
    if not to_split:
        # What is not trained may be large, and rests in parts then.
        return dataclasses.replace(whole("every parameter is tiny"), in_parts=in_parts)
    if wanted is WeightUpdate.AUTO and sum(to_split) < _WORTH_BYTES:
        return whole("the parameters are too small to gain from it")
    state_stays = (False,) * len(arrays) if in_parts else unread.state
    of_state = tuple(
        each if still else other
        for each, other, still in zip(
            whole_state, _split_alike(whole_state, partitions), state_stays, strict=True
        )
    )
    split = functools.partial(planned, in_parts=in_parts)
    pairs = _whole_and_slices(params, state, partitions, of_state)
    if alone is None and is_elementwise(update, *pairs):
        why = "the update is elementwise"
        return split(UpdateStrategy.PARTS, why, partitions, of_state)
    if only_parts and wanted is WeightUpdate.SHARDED:
        obstacle = why_not_elementwise(update, *pairs)
        raise WeightUpdateError(
            f"The weight update cannot be sharded here: with groups, or inside your own shard_map, "
            f"each shard updates its slice alone, and this update is not elementwise: {obstacle}. "
            f"Pass weight_update='replicated', or use make_train_step without groups."
        )
    # What is compiled as one program on one shard is so on all others.
    not_leafwise, may_be_dealt = "", alone is not None or not same_bits
    if may_be_dealt and not (only_parts or any(other_axes)):
        # A gradient that nothing reads is not sent, to no owner either.
        partitions = tuple(
            Partition(each.shape) if unread.gradients[place] else each
            for place, each in enumerate(partitions)
        )
        try:
            in_loops = sums_in_loops and not same_bits
            dealt = deal_over(partitions, number, tile, in_parts=in_parts, sums_in_loops=in_loops)
            if wanted is WeightUpdate.AUTO and is_lopsided(dealt):
                return whole("one shard would do most of it, if each leaf were updated by one")
            if wanted is WeightUpdate.AUTO and same_bits and dealt.exchanged:
                return whole("gradients would travel twice, to be updated whole")
            why = "each leaf is updated from its own arrays, and from scalars"
            return split(UpdateStrategy.DEALT, why, dealt.params, dealt.state, dealt=dealt)
        except NotLeafwise as reason:
            not_leafwise = str(reason)
    obstacle = why_not_elementwise(update, *pairs)
    if not_leafwise not in ("", obstacle):
        obstacle = f"{obstacle}; nor leaf by leaf: {not_leafwise}"
    if same_bits and wanted is WeightUpdate.SHARDED:
        raise WeightUpdateError(
            f"With virtual_shards the bits must not depend on the number of shards, and a sharded "
            f"update of this optimizer, which is neither elementwise nor leaf by leaf, is compiled "
            f"differently for each of them: {obstacle}. Pass weight_update='replicated', and leave "
            f"params='sharded' out."
        )
    why = f"the update is not elementwise: {obstacle}"
    if wanted is WeightUpdate.AUTO:
        return whole(why)
    along_axis = lambda each: partition_along_axis(each.shape, number, tile, each.other_axes)
    partitions = tuple(
        each if still else along_axis(each) for each, still in zip(whole_params, stays, strict=True)
    )
    return split(UpdateStrategy.GLOBAL, why, partitions, tuple(map(along_axis, whole_state)))


_LOSS = jax.ShapeDtypeStruct((), "float32")


def _is_elementwise(
    update: Callable[..., Any],
    params: Any,
    state: Any,
    of_params: Sequence[Partition],
    of_state: Sequence[Partition],
) -> bool:
    """Whether an update ``as_function`` runs on halves of its arrays, for any number of shards."""
    halves = [partition_for(each.shape, 2) for each in of_params]
    pairs = _whole_and_slices(params, state, halves, _split_alike(of_state, halves))
    return is_elementwise(update, *pairs)


def _check_state_stays(update: Callable[..., Any], params: Any, state: Any) -> None:
    try:
        _, after = jax.eval_shape(update, params, state, params, _LOSS)
    except CrossshardError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if "required keyword-only argument" not in str(error):
            raise ArgumentError(
                f"The optimizer cannot update these parameters: {type(error).__name__}, "
                f"{str(error).splitlines()[0]}. One that takes parameters of a form of its own, as "
                f"optax.lookahead does, or the gradient of each example, as optax.contrib.dpsgd "
                f"does, is for the Optax idiom: init and update, in a loop of your own."
            ) from error
        raise ArgumentError(
            f"The optimizer needs more than gradients and the loss, which is all that a step has: "
            f"{str(error).splitlines()[0]}. Optimizers with a line search need the loss function; "
            f"call them in a loop of your own."
        ) from error
    was, now = (
        (jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)])
        for tree in (state, after)
    )
    if was != now:
        raise ArgumentError(
            f"The optimizer's state changes its structure or dtypes in a step, but a step is "
            f"compiled for one of them: from {was} to {now}."
        )


def _unsplit(tree: Any, other_axes: Sequence[PartitionSpec]) -> tuple[Partition, ...]:
    leaves = zip(jax.tree.leaves(tree), other_axes, strict=True)
    return tuple(Partition(leaf.shape, other_axes=own) for leaf, own in leaves)


def _split_alike(state: Sequence[Partition], params: Sequence[Partition]) -> list[Partition]:
    """The partitions of arrays of the state: those with the shape of a parameter as it is."""
    alike = {(each.shape, each.other_axes): each for each in params if each.number > 1}
    return [alike.get((each.shape, each.other_axes), each) for each in state]


def as_function(find: Callable[..., Any]) -> Callable[..., Any]:
    """An update ``as_updates`` as ``(params, state, gradients, loss) -> (params, state)``."""

    def update(params: Any, state: Any, gradients: Any, loss: Any) -> tuple[Any, Any]:
        updates, after = find(params, state, gradients, loss)
        return optax.apply_updates(params, updates), after

    return update


def as_updates(optimizer: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    """An optimizer as ``(params, state, gradients, loss) -> (updates, state)``, to be traced."""

    def update(params: Any, state: Any, gradients: Any, loss: Any) -> tuple[Any, Any]:
        extra_args = {"value": loss} if takes_value(optimizer) else {}
        with inside_optimizer():
            found: tuple[Any, Any] = optimizer.update(gradients, state, params, **extra_args)
        return found

    return update


def _traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Python runs once for arguments of the same types.

    After that it is what it was traced as, with the names and the source lines of that.
    """
    known: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple(map(jax.typeof, leaves))
        if key not in known:
            jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
            known[key] = _jax.as_function(jaxpr), jax.tree.structure(out)
        found, out = known[key]
        return jax.tree.unflatten(out, found(*leaves))

    return run


def why_not_in_parts(
    update: Callable[..., Any],
    params: Any,
    state: Any,
    of_params: Sequence[Partition],
    of_state: Sequence[Partition],
) -> str | None:
    """Why an update ``as_function`` cannot run on slices of these arrays; ``None`` if it can."""
    return why_not_elementwise(update, *_whole_and_slices(params, state, of_params, of_state))


def _whole_and_slices(
    params: Any, state: Any, of_params: Sequence[Partition], of_state: Sequence[Partition]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The types of the arguments of an update ``as_function``, on one shard and on each."""
    local = lambda partition, x: jax.ShapeDtypeStruct(partition.local_shape, x.dtype)
    slices = map_partitions(local, of_params, params)
    of_slices = map_partitions(local, of_state, state)
    return (params, state, params, _LOSS), (slices, of_slices, slices, _LOSS)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    # JAX 0.12 warns of a type of 64 bits, where it would narrow an array without a word.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)
