"""Many arrays summed, scattered or gathered at once: small ones travel in one bucket."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from crossshard.collectives.parts import Cut, gather_parts, scatter_sum
from crossshard.collectives.sums import sum_over_shards
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment

Bucket = list[tuple[jax.Array, Cut]]


def sum_together(
    xs: Sequence[jax.Array],
    cuts: Sequence[Cut],
    shards: Shards,
    groups: GroupAssignment | None = None,
) -> list[jax.Array]:
    """The sum of each array over the shards, or the groups: this shard's part of it, as cut."""

    def scatter(x: jax.Array, axis: int) -> jax.Array:
        return scatter_sum(x, axis, shards, groups)

    def moved(bucket: Bucket) -> list[jax.Array]:
        (first, cut), *others = bucket
        if cut.number == 1 and not others:
            return [sum_over_shards(first, shards, groups)]
        if cut.number == 1:
            flat = jnp.concatenate([x.ravel() for x, _ in bucket])
            return _taken_apart(sum_over_shards(flat, shards, groups), bucket)
        if not others:
            return [_alone(cut, cut.stored(first), cut.part_shape, scatter)]
        rows = [each.stored(x).reshape(cut.number, -1) for x, each in bucket]
        width = sum(row.shape[1] for row in rows)
        padding = jnp.zeros((cut.number, -width % cut.limits.tile), first.dtype)
        columns = jnp.concatenate([*rows, padding], axis=1)
        return _taken_apart(scatter(columns.reshape(-1, cut.limits.lanes), 0).ravel(), bucket)

    return _by_bucket(xs, cuts, shards, moved)


def gather_together(
    parts: Sequence[jax.Array],
    cuts: Sequence[Cut],
    shards: Shards,
    groups: GroupAssignment | None = None,
) -> list[jax.Array]:
    """The whole of each array, from every shard's part of it; what is not cut stays as it is."""

    def gather(x: jax.Array, axis: int) -> jax.Array:
        return gather_parts(x, axis, shards, groups)

    def moved(bucket: Bucket) -> list[jax.Array]:
        (first, cut), *others = bucket
        if cut.number == 1:
            return [x for x, _ in bucket]
        if not others:
            return [cut.whole(_alone(cut, first, cut.stored_shape, gather))]
        flat = jnp.concatenate([x.ravel() for x, _ in bucket])
        row = jnp.pad(flat, (0, -flat.size % cut.limits.tile)).reshape(-1, cut.limits.lanes)
        columns = gather(row, 0).reshape(cut.number, -1)
        between = zip(_between([x.size for x, _ in bucket]), bucket, strict=True)
        return [
            each.whole(columns[:, start:end].reshape(each.stored_shape))
            for (start, end), (_, each) in between
        ]

    return _by_bucket(parts, cuts, shards, moved)


def _by_bucket(
    xs: Sequence[jax.Array],
    cuts: Sequence[Cut],
    shards: Shards,
    move: Callable[[Bucket], list[jax.Array]],
) -> list[jax.Array]:
    """Each array moved, the small ones of one dtype together; in their order."""
    # Under vmap nothing is sent, and types may forbid a bucket of values that differ in them.
    together = shards.manual and not shards.tracked and shards.number > 1
    places: dict[object, list[int]] = {}
    for place, (x, cut) in enumerate(zip(xs, cuts, strict=True)):
        key = (x.dtype, cut.number) if cut.is_small and together else place
        places.setdefault(key, []).append(place)
    after: dict[int, jax.Array] = {}
    for members in places.values():
        bucket = [(xs[place], cuts[place]) for place in members]
        after.update(zip(members, move(bucket), strict=True))
    return [after[place] for place in range(len(xs))]


def _alone(
    cut: Cut, x: jax.Array, shape: tuple[int, ...], move: Callable[[jax.Array, int], jax.Array]
) -> jax.Array:
    """An array moved by itself, in rows where it is cut in the order of its elements."""
    if cut.axis is None:
        return move(x.reshape(-1, cut.limits.lanes), 0).reshape(shape)
    return move(x, cut.axis)


def _taken_apart(flat: jax.Array, bucket: Bucket) -> list[jax.Array]:
    """What a bucket's arrays, or this shard's parts of them, became on their way."""
    widths = [math.prod(cut.part_shape) for _, cut in bucket]
    pieces = zip(_between(widths), bucket, strict=True)
    return [flat[start:end].reshape(cut.part_shape) for (start, end), (_, cut) in pieces]


def _between(widths: Iterable[int]) -> Iterable[tuple[int, int]]:
    return itertools.pairwise(itertools.accumulate(widths, initial=0))
