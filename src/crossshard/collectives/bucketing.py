"""Bucketing: small arrays of one dtype share a collective."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from crossshard import _jax
from crossshard.collectives.sums import send_gathered, send_scattered, send_sum
from crossshard.shards.axes import Shards
from crossshard.shards.cut import Partition

Bucket = list[tuple[jax.Array, Partition]]

# Many arrays of one shape share buckets of so many. XLA compiles a kernel that reads from a bucket
# once for each offset, and buckets of equal arrays share these kernels.
_OF_ONE_SHAPE = range(8, 17)


def bucketed_sum(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
) -> list[jax.Array]:
    """This shard's slice of the sum of each array over the shards, or the groups.

    Arrays of 16 bits are sent in 16 bits, and their sums are float32.
    """
    if shards.other_axes:
        return list(on_blocks(bucketed_sum, xs, partitions, shards))
    scatter = functools.partial(send_scattered, shards=shards)
    total = functools.partial(send_sum, shards=shards)

    def move(bucket: Bucket) -> list[jax.Array]:
        (first, partition), *others = bucket
        if partition.number == 1 and not others:
            return [total(first)]
        if partition.number == 1:
            flat = jnp.concatenate([_whole(x).ravel() for x, _ in bucket])
            return split_bucket(total(flat), bucket)
        if not others and partition.fills_rows:
            return [_alone(partition, partition.pack(first), partition.local_shape, scatter)]
        rows = [each.pack(x).reshape(partition.number, -1) for x, each in bucket]
        width = sum(row.shape[1] for row in rows)
        padding = jnp.zeros((partition.number, partition.tile.padding(width)), first.dtype)
        columns = jnp.concatenate([*rows, padding], axis=1)
        return split_bucket(scatter(columns.reshape(-1, partition.tile.lanes), 0).ravel(), bucket)

    return by_bucket(xs, partitions, shards, move)


def bucketed_gather(
    parts: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
) -> list[jax.Array]:
    """Each array in full, all-gathered from its slices; replicated arrays are unchanged."""
    if shards.other_axes:
        return list(on_blocks(bucketed_gather, parts, partitions, shards))
    gather = functools.partial(send_gathered, shards=shards)

    def move(bucket: Bucket) -> list[jax.Array]:
        (first, partition), *others = bucket
        if partition.number == 1:
            return [x for x, _ in bucket]
        if not others and partition.fills_rows:
            return [partition.unpack(_alone(partition, first, partition.packed_shape, gather))]
        flat = jnp.concatenate([x.ravel() for x, _ in bucket])
        row = jnp.pad(flat, (0, partition.tile.padding(flat.size)))
        row = row.reshape(-1, partition.tile.lanes)
        columns = gather(row, 0).reshape(partition.number, -1)
        between = zip(_between([x.size for x, _ in bucket]), bucket, strict=True)
        return [
            each.unpack(columns[:, start:end].reshape(each.packed_shape))
            for (start, end), (_, each) in between
        ]

    return by_bucket(parts, partitions, shards, move)


def _whole(x: jax.Array) -> jax.Array:
    """``x``; a scalar as a value of its own, that is not computed within the bucket's kernel.

    Otherwise a loss would be computed when the last gradient of its bucket is, and the activations
    that it reads, such as a language model's logits, would be kept until then.
    """
    return x if x.ndim else lax.optimization_barrier(x)


def on_blocks(
    move: Callable[..., Any],
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
    *whole: Any,
    each: Callable[[Any], Any] = lambda specs: specs,
) -> Any:
    """``move`` applied to each device's blocks of arrays that are split over other axes.

    Left to XLA, it would gather the blocks before a reduce-scatter.

    Args:
      move: a function of the arrays, their partitions, the shards and what is ``whole``.
      xs: the arrays.
      partitions: the partition of each.
      shards: the shards.
      *whole: what every device has whole.
      each: makes the specs of what it returns from those of the arrays.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    blocks = [partition.of_block(sizes) for partition in partitions]
    specs = [partition.other_axes for partition in partitions]
    of_device = dataclasses.replace(shards, other_axes=())
    run = _jax.shard_map(
        lambda xs, *whole: move(xs, blocks, of_device, *whole),
        axis_names=frozenset(shards.other_axes),
        in_specs=(specs, *[PartitionSpec()] * len(whole)),
        out_specs=each(specs),
    )
    return run(list(xs), *whole)


def by_bucket(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
    move: Callable[[Bucket], list[jax.Array]],
) -> list[jax.Array]:
    """``move`` applied to each array, small ones of one dtype in one bucket; in their order."""
    # vmap does not communicate, and arrays that vary over different axes cannot share a bucket.
    buckets_pay = shards.manual and not shards.has_vma and shards.number > 1
    kinds = [(x.dtype, partition) for x, partition in zip(xs, partitions, strict=True)]
    number, seen = Counter(kinds), Counter[object]()
    members_of: dict[object, list[int]] = {}
    for index, kind in enumerate(kinds):
        key: object = index
        dtype, partition = kind
        if partition.is_small and buckets_pay:
            size = _bucket_size(number[kind])
            nth = seen[kind] // size
            is_full = nth < number[kind] // size
            key = (kind, nth) if is_full else (dtype, partition.number)
            seen[kind] += 1
        members_of.setdefault(key, []).append(index)
    moved: dict[int, jax.Array] = {}
    for members in members_of.values():
        bucket = [(xs[index], partitions[index]) for index in members]
        moved.update(zip(members, move(bucket), strict=True))
    return [moved[index] for index in range(len(xs))]


def _bucket_size(number: int) -> int:
    """How many of ``number`` arrays of one shape share a bucket, such that few are left over."""
    if number < max(_OF_ONE_SHAPE):
        return max(_OF_ONE_SHAPE)
    return min(_OF_ONE_SHAPE, key=lambda size: (number % size, -size))


def _alone(
    partition: Partition,
    x: jax.Array,
    shape: tuple[int, ...],
    move: Callable[[jax.Array, int], jax.Array],
) -> jax.Array:
    """``move`` applied to one array; in rows, if its flattened elements are split."""
    if partition.axis is None:
        return move(x.reshape(-1, partition.tile.lanes), 0).reshape(shape)
    return move(x, partition.axis)


def split_bucket(flat: jax.Array, bucket: Bucket) -> list[jax.Array]:
    """The arrays of a reduced or gathered bucket."""
    shapes = [partition.local_shape for _, partition in bucket]
    pieces = zip(_between(map(math.prod, shapes)), shapes, strict=True)
    return [flat[start:end].reshape(shape) for (start, end), shape in pieces]


def _between(widths: Iterable[int]) -> Iterable[tuple[int, int]]:
    return itertools.pairwise(itertools.accumulate(widths, initial=0))
