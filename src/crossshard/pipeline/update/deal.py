"""Deal: plans an update leaf by leaf, with owners for what cannot be cut."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from crossshard.jaxprs.leafwise import find_leafwise
from crossshard.pipeline.update.dealt import Dealt, bytes_of
from crossshard.shards.partition import Partition, TileShape, partition_along_axis
from crossshard.shards.rows import Unit, owners_of


def deal(
    update: Callable[..., tuple[Any, Any]],
    params: Any,
    state: Any,
    extra: Sequence[Any],
    partitions: Sequence[Partition],
    number: int,
    tile: TileShape,
    *,
    in_parts: bool,
    sums_in_loops: bool,
    virtual: int | None = None,
) -> Dealt:
    """Plan an update that is not elementwise.

    Args:
      update: from ``(params, state, gradients, *extra)`` to ``(updates, state)``.
      params: its parameters, a pytree with shapes and dtypes.
      state: its state.
      extra: its further arguments.
      partitions: the partition of each parameter; those that are not split are updated by every
        shard.
      number: the number of shards.
      tile: the smallest slice that the platform scatters efficiently.
      in_parts: whether the parameters rest so.
      sums_in_loops: whether gradients of stacked layers are to be summed layer by layer.
      virtual: if its bits must not depend on the number of shards, into how many pieces leaves are
        cut on all shards together.

    Raises:
      NotLeafwise: it cannot be computed leaf by leaf.
    """
    types = tuple(jax.tree.leaves(params)), tuple(jax.tree.leaves(state))
    partitions, cut = [_within_layers(each) for each in partitions], dict[int, Partition]()
    if virtual is not None:
        for i, each in enumerate(partitions):
            # For any tile, which may depend on the number of shards.
            piece = partition_along_axis(each.shape, virtual)
            if piece.number > 1:
                cut[i] = piece
                if each.number > 1:
                    partitions[i] = dataclasses.replace(piece, number=number, tile=tile)
    split = {i: each for i, each in enumerate(partitions) if each.number > 1}
    layers = {i: each.shape[0] for i, each in split.items() if _may_be_layers(each, number)}
    stay: dict[int, str] = {}
    if virtual is None:
        slices = {i: each.local_shape for i, each in split.items()}
        # So many layers go to each shard; if they do not divide, each has an owner.
        together = {i: own // number if own % number == 0 else 1 for i, own in layers.items()}
    else:
        # Of all leaves, whether they are split or not, and whatever the number of shards.
        slices = {i: cut.get(i, each).local_shape for i, each in enumerate(partitions)}
        together = {i: 1 for i, each in enumerate(partitions) if _has_layers(each)}
        why = f"it has no axis that divides by {virtual}"
        stay = {i: why for i in slices if i not in cut}
    stacks = {i: (own, *partitions[i].shape[1:]) for i, own in together.items()}
    padded = [i for i, each in split.items() if each.packed_shape != each.shape]
    found = find_leafwise(update, params, state, extra, slices, stacks, padded, stay)
    pieces = {} if virtual is None else dict.fromkeys(found.stacked, (0, 1))
    for i in set(cut).difference(found.stacked, found.whole):
        axis = cut[i].axis or 0
        pieces[i] = axis, cut[i].local_shape[axis]
    stacked = [i for i in found.stacked if i in layers]
    layered = [i for i in stacked if layers[i] % number]
    of_one = [i for i in found.whole if i in split]
    costs: dict[Unit, float] = {(i, None): _cost(partitions[i].shape) for i in of_one}
    costs |= {(i, row): _cost(partitions[i].shape[1:]) for i in layered for row in range(layers[i])}
    owners = owners_of(costs, number)
    chosen = list(partitions)
    for i in found.stacked.difference(stacked):
        chosen[i] = Partition(partitions[i].shape)
    for i in set(stacked).difference(layered):
        if not in_parts and not (sums_in_loops and partitions[i].axis):
            chosen[i] = Partition(partitions[i].shape, number, 0, tile)
    waits = lambda i: sums_in_loops and _has_rows(partitions[i])
    whole = [i for i in (*of_one, *layered) if not (in_parts or waits(i))]
    for i in whole:
        chosen[i] = Partition(partitions[i].shape)
    dealt = Dealt(found, owners, tuple(chosen), types, number, tile, pieces)
    own = sum(bytes_of(types[0][i]) for i in whole)
    sent = sum(number * rows.width * rows.dtype.itemsize for rows in dealt.rows)
    if sent <= own + own / number:
        return dealt
    # Rows would be mostly padding: owners get the slices of their leaves instead.
    for i in whole:
        chosen[i] = partitions[i]
    return dataclasses.replace(dealt, params=tuple(chosen))


def is_lopsided(dealt: Dealt) -> bool:
    """Whether most of the work, and of what is split, would be one owner's."""
    cost = lambda leaf, row: _cost(dealt.types[0][leaf].shape[0 if row is None else 1 :])
    loads = [sum(cost(*unit) for unit in own) for own in dealt.of_shard]
    split = [i for i, each in enumerate(dealt.arranged) if each.number > 1 or i in dealt.owned]
    of_owners, of_all = (sum(bytes_of(dealt.types[0][i]) for i in x) for x in (dealt.owned, split))
    return 2 * max(loads) > sum(loads) and 2 * of_owners > of_all


def _within_layers(partition: Partition) -> Partition:
    """The same, within each layer if whole layers do not divide."""
    shape, number = partition.shape, partition.number
    if partition.axis or len(shape) < 3 or shape[0] % number == 0:
        return partition
    within = partition_along_axis(shape, number, partition.tile)
    return within if within.axis else partition


def _may_be_layers(partition: Partition, number: int) -> bool:
    """Whether a leaf may be dealt out layer by layer, also if it travels in slices."""
    return _has_layers(partition) and (partition.shape[0] % number == 0 or bool(partition.axis))


def _has_layers(partition: Partition) -> bool:
    return len(partition.shape) > 2 and partition.shape[0] > 1


def _has_rows(partition: Partition) -> bool:
    """Whether gradients may be summed row by row, where the backward pass makes them."""
    return partition.row is not None or Partition(partition.shape).row is not None


def _cost(shape: Sequence[int]) -> float:
    """The work on a leaf: products of a matrix with itself, or reading it."""
    long = sorted(shape, reverse=True)
    return math.prod(shape) * (long[1] if len(long) > 1 else 1)
