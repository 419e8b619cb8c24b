"""Sums, gathers and exchanges over the shards, or over groups, under shard_map, pmap and vmap.

``sum_over_shards``, ``scatter_sum``, ``gather_slices`` and ``exchange`` send arrays as they are.
The four ``send_…`` send 16-bit arrays in 16 bits. CPUs add them in float32; GPUs and TPUs in 16
bits. In the ``bucketed_…`` small arrays share a collective. ``average`` makes the mean of a sum of
what ``to_average`` returns.
"""

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
from jaxtyping import Array, Float, Inexact, Shaped

from crossshard import _jax
from crossshard.errors import ShardContextError
from crossshard.shards.axes import Shards
from crossshard.shards.cut import Partition


def widen(x: Any) -> jax.Array:
    """Return ``x`` in the dtype in which it is summed."""
    return jnp.asarray(x, wide(jnp.result_type(x)))


def wide(dtype: Any) -> Any:
    """Return the dtype in which arrays are summed: float32 for 16 bits, which overflow or round."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def check_bound(shards: Shards, done: str) -> None:
    """Raise ShardContextError if there are several shards, but no bound axis to sum over."""
    if shards.num_shards > 1 and not shards.axes:
        raise ShardContextError(
            f"The shard context has {shards.num_shards} shards, but no mesh axis is bound here, so "
            f"nothing can be {done} them. Run the step with "
            f"crossshard.shard(num_shards={shards.num_shards}), or inside jax.shard_map."
        )


# ---- Arrays are sent as they are.


def sum_over_shards(x: Any, shards: Shards) -> Any:
    """Return the sum of ``x`` over the shards, or over the groups, in its shape and dtype.

    Bools are counted in int32. The result is invariant unless there are several groups.
    """
    if shards.is_grouped:
        return _sum_over_group(shards.as_varying(x), shards)
    if not shards.axes:
        check_bound(shards, "summed over")
        return x
    # An unreduced value is a pending sum, so it must not be cast to varying first.
    unreduced = tuple(axis for axis in shards.axes if axis in _jax.unreduced_axes(x))
    x = lax.psum(x, unreduced) if unreduced else x
    rest = tuple(axis for axis in shards.axes if axis not in unreduced)
    return lax.psum(_jax.as_varying(x, rest) if shards.has_vma else x, rest) if rest else x


def _sum_over_group(x: Any, shards: Shards) -> Any:
    if shards.group_size == 1 or jnp.size(x) == 0:
        return x
    check_bound(shards, "summed over")
    if not shards.manual:
        assert shards.groups is not None
        parts = gather_over_shards(x, shards)[shards.groups.members].sum(1)
        return parts[jnp.asarray(shards.groups.group_of)[shards.index()]]
    # psum rejects groups under check_vma=True. These two accept them, and send the same bytes.
    flat = jnp.pad(jnp.ravel(x), (0, -jnp.size(x) % shards.group_size))
    total = _gather_sums(scatter_sum(flat, 0, shards), shards)
    return total[: jnp.size(x)].reshape(jnp.shape(x))


def scatter_sum(x: jax.Array, axis: int, shards: Shards) -> jax.Array:
    """Return this shard's slice along ``axis`` of the sum over the shards or over its group."""
    reduce_scatter = lambda x: _reduce_scatter(x, axis, shards)
    if not shards.manual or not _jax.has_coordinator():
        return reduce_scatter(x)
    # With a coordinator, XLA for CPUs sends everything through gloo, even within a process. Of
    # gloo's collectives only the reduce-scatter fails if one is half a minute late (jax#40831).
    by_exchange = lambda x: exchange(x, axis, shards).sum(0, dtype=x.dtype)
    return shards.by_platform(x, cpu=by_exchange, default=reduce_scatter)


def _reduce_scatter(x: jax.Array, axis: int, shards: Shards) -> jax.Array:
    stages = shards.scatter_schedule()
    if shards.is_inner_first:
        x = _reordered(x, axis, _sizes(stages))
        stages.reverse()
    for name, members in stages:
        over: Any = {"axis_index_groups": members, "tiled": True}
        x = lax.psum_scatter(x, name, scatter_dimension=axis, **over)
    return x


def gather_slices(x: jax.Array, axis: int, shards: Shards) -> jax.Array:
    """Concatenate the slices of all shards, or of the group, along ``axis``.

    The result is invariant unless there are groups.
    """
    if shards.groups is not None and not shards.manual:
        return jnp.concatenate(list(gather_over_group(x, shards)), axis)
    stages = shards.scatter_schedule()
    for name, members in stages if shards.is_inner_first else reversed(stages):
        if members is None:
            x = _jax.all_gather(x, name, axis, has_vma=shards.has_vma)
        else:
            x = lax.all_gather(x, name, axis=axis, axis_index_groups=members, tiled=True)
    return _reordered(x, axis, _sizes(stages)[::-1]) if shards.is_inner_first else x


def _gather_sums(x: jax.Array, shards: Shards) -> jax.Array:
    """Gather what ``scatter_sum`` returned along axis 0, so that both can be differentiated."""
    gather = lambda x: gather_slices(x, 0, shards)
    if not _jax.has_coordinator():
        return gather(x)
    # The derivative of an all-gather is a reduce-scatter, and that of an exchange an exchange.
    by_exchange = lambda x: exchange(jnp.tile(x, shards.group_size), 0, shards).ravel()
    return shards.by_platform(x, cpu=by_exchange, default=gather)


def exchange(x: jax.Array, axis: int, shards: Shards) -> jax.Array:
    """Return this shard's slice along ``axis`` of every shard's ``x``, ``[shards, …]``, in order.

    Their sum is the result of a reduce-scatter, and this sends as many bytes.
    """
    before, length, after = x.shape[:axis], x.shape[axis] // shards.group_size, x.shape[axis + 1 :]
    parts = jnp.moveaxis(x.reshape(*before, shards.group_size, length, *after), axis, 0)
    if shards.groups is not None and not shards.manual:
        return gather_over_group(parts, shards)[:, shards.index_in_group()]
    return lax.all_to_all(
        shards.as_varying(parts),
        shards.axes,
        split_axis=0,
        concat_axis=0,
        axis_index_groups=shards.members,
        tiled=True,
    )


def resplit(x: jax.Array, split: int, join: int, shards: Shards) -> jax.Array:
    """Turn slices along the axis ``join`` into slices along ``split``, by an all-to-all."""
    return lax.all_to_all(
        shards.as_varying(x), shards.axes, split_axis=split, concat_axis=join, tiled=True
    )


def gather_over_shards(x: Any, shards: Shards) -> jax.Array:
    """Return the ``x`` of every shard, ``[shards, …]``, in order."""
    # One axis at a time: under vmap, all_gather does not accept a tuple of axes.
    for axis in reversed(shards.axes):
        x = lax.all_gather(x, axis)
    depth = len(shards.axes)
    return x.reshape(math.prod(x.shape[:depth]), *x.shape[depth:])


def gather_over_group(x: jax.Array, shards: Shards) -> jax.Array:
    """Return the ``x`` of each shard of this group, ``[size, …]``, under vmap, too."""
    of_all = gather_over_shards(x, shards)
    if shards.groups is None:
        return of_all
    members = shards.groups.members[shards.groups.group_of]
    return of_all[jnp.asarray(members)[shards.index()]]


def _sizes(stages: list[Any]) -> list[int]:
    return [lax.axis_size(name) if members is None else len(members[0]) for name, members in stages]


def _reordered(x: jax.Array, axis: int, sizes: list[int]) -> jax.Array:
    """Split an axis into axes of these sizes, reverse the order of these, and merge them."""
    blocks = x.reshape(*x.shape[:axis], *sizes, -1, *x.shape[axis + 1 :])
    count = len(sizes)
    order = [*range(blocks.ndim)]
    order[axis : axis + count] = reversed(order[axis : axis + count])
    return blocks.transpose(order).reshape(x.shape)


# ---- 16-bit arrays are sent in 16 bits.


def send_scattered(x: jax.Array, axis: int, shards: Shards) -> jax.Array:
    """Return this shard's slice along ``axis`` of the sum."""
    if not _is_narrow(x):
        return scatter_sum(x, axis, shards)
    if not shards.manual:
        return scatter_sum(x.astype(jnp.float32), axis, shards)
    return shards.by_platform(
        x,
        cpu=lambda x: _sum_of_exchanged(x, axis, shards),
        default=lambda x: scatter_sum(x, axis, shards).astype(jnp.float32),
    )


def send_sum(x: jax.Array, shards: Shards) -> jax.Array:
    """Return the sum; that of 16-bit arrays as float32, rounded to 16 bits outside of ``vmap``."""
    if not _is_narrow(x):
        return sum_over_shards(x, shards)
    if not shards.manual or shards.num_shards == 1:
        return sum_over_shards(x.astype(jnp.float32), shards)

    def by_exchange(x: jax.Array) -> jax.Array:
        flat = jnp.pad(x.ravel(), (0, -x.size % shards.group_size))
        part = _sum_of_exchanged(flat, 0, shards).astype(x.dtype)
        whole = lax.bitcast_convert_type(gather_slices(_as_bits(part), 0, shards), x.dtype)
        return whole[: x.size].reshape(x.shape)

    total = shards.by_platform(x, cpu=by_exchange, default=lambda x: sum_over_shards(x, shards))
    return total.astype(jnp.float32)


def send_gathered(x: jax.Array, axis: int, shards: Shards) -> jax.Array:
    """Concatenate the slices of all shards, or of the group, along ``axis``."""
    return _in_bits(x, lambda x: gather_slices(x, axis, shards), shards)


def send_exchanged(x: jax.Array, shards: Shards) -> jax.Array:
    """Send row ``i`` of ``x`` to shard ``i``; return the rows received, in order of the shards."""
    return _in_bits(x, lambda x: exchange(x, 0, shards)[:, 0], shards)


def _is_narrow(x: Any) -> bool:
    """Return whether an array has fewer bits than the dtype in which it is added."""
    return jnp.issubdtype(x.dtype, jnp.floating) and wide(x.dtype) != x.dtype


def _in_bits(x: jax.Array, move: Callable[[jax.Array], jax.Array], shards: Shards) -> jax.Array:
    """Return ``move(x)``; on CPUs 16-bit floats move as integers, since XLA would send 32 bits."""
    if not _is_narrow(x):
        return move(x)
    by_bits = lambda x: lax.bitcast_convert_type(move(_as_bits(x)), x.dtype)
    return shards.by_platform(x, cpu=by_bits, default=move)


def _sum_of_exchanged(x: jax.Array, axis: int, shards: Shards) -> jax.Array:
    """Return the sum of the slices that the shards send to this one, float32.

    XLA for CPUs adds, and sends what it adds, in float32; what it only moves keeps its 16 bits.
    """
    received = exchange(_as_bits(x), axis, shards)
    return lax.bitcast_convert_type(received, x.dtype).astype(jnp.float32).sum(0)


def _as_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16)


# ---- Buckets: small arrays of one dtype share a collective.


Bucket = list[tuple[jax.Array, Partition]]

# How many arrays of one shape share a bucket. XLA compiles a kernel that reads from a bucket
# once for each offset, and buckets of equal arrays share these kernels.
_OF_ONE_SHAPE = range(8, 17)


def bucketed_sum(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
) -> list[jax.Array]:
    """Return this shard's slice of the sum of each array over the shards, or the groups.

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
            flat = jnp.concatenate([_not_fused(x).ravel() for x, _ in bucket])
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
    """Gather each array in full from its slices; replicated arrays are unchanged."""
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
        spans = zip(_spans([x.size for x, _ in bucket]), bucket, strict=True)
        return [
            each.unpack(columns[:, start:end].reshape(each.packed_shape))
            for (start, end), (_, each) in spans
        ]

    return by_bucket(parts, partitions, shards, move)


def _not_fused(x: jax.Array) -> jax.Array:
    """Return ``x``; a scalar behind a barrier, so that the bucket's kernel does not compute it.

    Otherwise a loss would be computed when the last gradient of its bucket is, and the activations
    that it reads, such as a language model's logits, would be kept until then.
    """
    return x if x.ndim else lax.optimization_barrier(x)


def on_blocks(
    move: Callable[..., Any],
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
    *replicated: Any,
    out_specs: Callable[[Any], Any] = lambda specs: specs,
) -> Any:
    """Apply ``move`` to each device's blocks of arrays that are split over other axes.

    XLA itself would gather the blocks before a reduce-scatter.

    Args:
      move: a function of the arrays, their partitions, the shards and what is ``replicated``.
      xs: the arrays.
      partitions: the partition of each.
      shards: the shards.
      *replicated: arrays that every device has in full.
      out_specs: returns the specs of what ``move`` returns, given those of the arrays.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    blocks = [partition.of_block(sizes) for partition in partitions]
    specs = [partition.other_axes for partition in partitions]
    of_device = dataclasses.replace(shards, other_axes=())
    run = _jax.shard_map(
        lambda xs, *replicated: move(xs, blocks, of_device, *replicated),
        axis_names=frozenset(shards.other_axes),
        in_specs=(specs, *[PartitionSpec()] * len(replicated)),
        out_specs=out_specs(specs),
    )
    return run(list(xs), *replicated)


def by_bucket(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
    move: Callable[[Bucket], list[jax.Array]],
) -> list[jax.Array]:
    """Apply ``move`` to all arrays, small ones of one dtype in buckets; the order is kept."""
    # vmap does not communicate, and arrays that vary over different axes cannot share a bucket.
    buckets_pay = shards.manual and not shards.has_vma and shards.num_shards > 1
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
    """Return how many of ``number`` arrays of one shape share a bucket, so that few are left."""
    if number < max(_OF_ONE_SHAPE):
        return max(_OF_ONE_SHAPE)
    return min(_OF_ONE_SHAPE, key=lambda size: (number % size, -size))


def _alone(
    partition: Partition,
    x: jax.Array,
    shape: tuple[int, ...],
    move: Callable[[jax.Array, int], jax.Array],
) -> jax.Array:
    """Apply ``move`` to one array; in rows, if its flattened elements are split."""
    if partition.axis is None:
        return move(x.reshape(-1, partition.tile.lanes), 0).reshape(shape)
    return move(x, partition.axis)


def split_bucket(flat: jax.Array, bucket: Bucket) -> list[jax.Array]:
    """Split a reduced or gathered bucket into its arrays."""
    shapes = [partition.local_shape for _, partition in bucket]
    pieces = zip(_spans(map(math.prod, shapes)), shapes, strict=True)
    return [flat[start:end].reshape(shape) for (start, end), shape in pieces]


def _spans(widths: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Return the start and the end of each of adjacent pieces of these widths."""
    return itertools.pairwise(itertools.accumulate(widths, initial=0))


# ---- Means: how the values of shards, or microbatches, are weighted, summed and divided.


def to_average(x: Any, weight: Float[Array, ""] | None) -> Inexact[Array, "..."]:
    """Return this shard's summand of a mean: ``x`` times its weight, 0 for weight 0 even if NaN."""
    wide = widen(x)
    if weight is None:
        return wide
    return jnp.where(weight != 0, wide * weight.astype(wide.dtype), 0)


def to_sum(x: Any, weight: Float[Array, ""] | None) -> Shaped[Array, "..."]:
    """Return this shard's summand of a sum: zero if its weight is zero."""
    wide = widen(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.asarray(x)
    return wide if weight is None else jnp.where(weight != 0, wide, 0)


def average(
    total: Inexact[Array, "*shape"], weight: Float[Array, ""] | None, number: int = 1
) -> Inexact[Array, "*shape"]:
    """Return the mean, from the sum of all summands and weights; zero if nothing has weight.

    Args:
      total: the sum of ``to_average`` over the shards.
      weight: the total weight; ``None`` if all shards count the same.
      number: the number of shards, if all count the same.
    """
    if weight is None:
        return total / number if number > 1 else total
    # XLA stores a quotient, but computes a product anew in each kernel that reads it.
    return total * jnp.where(weight != 0, 1 / weight.astype(total.dtype), 0)
