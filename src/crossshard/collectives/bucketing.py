"""Many arrays summed, scattered or gathered at once: small arrays travel in one bucket."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from crossshard.collectives.all_reduce import sum_over_shards
from crossshard.collectives.scatter import gather_parts, scatter_sum
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition

Bucket = list[tuple[jax.Array, Partition]]


def bucketed_sum(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
    groups: GroupAssignment | None = None,
) -> list[jax.Array]:
    """The sum of each array over the shards, or the groups: this shard's part of it."""

    def scatter(x: jax.Array, axis: int) -> jax.Array:
        return scatter_sum(x, axis, shards, groups)

    def move(bucket: Bucket) -> list[jax.Array]:
        (first, partition), *others = bucket
        if partition.number == 1 and not others:
            return [sum_over_shards(first, shards, groups)]
        if partition.number == 1:
            flat = jnp.concatenate([x.ravel() for x, _ in bucket])
            return _split_bucket(sum_over_shards(flat, shards, groups), bucket)
        if not others:
            return [_alone(partition, partition.pack(first), partition.local_shape, scatter)]
        rows = [each.pack(x).reshape(partition.number, -1) for x, each in bucket]
        width = sum(row.shape[1] for row in rows)
        padding = jnp.zeros((partition.number, -width % partition.tile.size), first.dtype)
        columns = jnp.concatenate([*rows, padding], axis=1)
        return _split_bucket(scatter(columns.reshape(-1, partition.tile.lanes), 0).ravel(), bucket)

    return _by_bucket(xs, partitions, shards, move)


def bucketed_gather(
    parts: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
    groups: GroupAssignment | None = None,
) -> list[jax.Array]:
    """Each array whole, from every shard's part of it; an array in one part stays as it is."""

    def gather(x: jax.Array, axis: int) -> jax.Array:
        return gather_parts(x, axis, shards, groups)

    def move(bucket: Bucket) -> list[jax.Array]:
        (first, partition), *others = bucket
        if partition.number == 1:
            return [x for x, _ in bucket]
        if not others:
            return [partition.unpack(_alone(partition, first, partition.packed_shape, gather))]
        flat = jnp.concatenate([x.ravel() for x, _ in bucket])
        row = jnp.pad(flat, (0, -flat.size % partition.tile.size)).reshape(-1, partition.tile.lanes)
        columns = gather(row, 0).reshape(partition.number, -1)
        between = zip(_between([x.size for x, _ in bucket]), bucket, strict=True)
        return [
            each.unpack(columns[:, start:end].reshape(each.packed_shape))
            for (start, end), (_, each) in between
        ]

    return _by_bucket(parts, partitions, shards, move)


def _by_bucket(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
    move: Callable[[Bucket], list[jax.Array]],
) -> list[jax.Array]:
    """Each array moved, the small ones of one dtype together; in their order."""
    # Under vmap nothing is sent, and types may forbid a bucket of values that differ in them.
    together = shards.manual and not shards.has_vma and shards.number > 1
    places: dict[object, list[int]] = {}
    for place, (x, partition) in enumerate(zip(xs, partitions, strict=True)):
        key = (x.dtype, partition.number) if partition.is_small and together else place
        places.setdefault(key, []).append(place)
    after: dict[int, jax.Array] = {}
    for members in places.values():
        bucket = [(xs[place], partitions[place]) for place in members]
        after.update(zip(members, move(bucket), strict=True))
    return [after[place] for place in range(len(xs))]


def _alone(
    partition: Partition,
    x: jax.Array,
    shape: tuple[int, ...],
    move: Callable[[jax.Array, int], jax.Array],
) -> jax.Array:
    """An array moved by itself; in rows, if its flattened elements are split."""
    if partition.axis is None:
        return move(x.reshape(-1, partition.tile.lanes), 0).reshape(shape)
    return move(x, partition.axis)


def _split_bucket(flat: jax.Array, bucket: Bucket) -> list[jax.Array]:
    """What a bucket's arrays, or this shard's parts of them, became on their way."""
    shapes = [partition.local_shape for _, partition in bucket]
    pieces = zip(_between(map(math.prod, shapes)), shapes, strict=True)
    return [flat[start:end].reshape(shape) for (start, end), shape in pieces]


def _between(widths: Iterable[int]) -> Iterable[tuple[int, int]]:
    return itertools.pairwise(itertools.accumulate(widths, initial=0))
