"""Reduce-scatter and all-gather over the shards, or over groups."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard import _jax
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment


def scatter_sum(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """This shard's slice along ``axis`` of the sum over the shards or over its group."""
    reduce_scatter = lambda x: _reduce_scatter(x, axis, shards, groups)
    if not shards.manual or not _jax.has_coordinator():
        return reduce_scatter(x)
    # XLA for CPUs sends everything through gloo then, within a process, too. Of gloo's collectives
    # only the reduce-scatter fails if another process is half a minute late (jax#40831).
    by_exchange = lambda x: exchange(x, axis, shards, groups).sum(0, dtype=x.dtype)
    return shards.by_platform(x, cpu=by_exchange, default=reduce_scatter)


def _reduce_scatter(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None
) -> jax.Array:
    stages = _schedule(shards, groups)
    if _is_inner_first(shards, groups):
        x = _reordered(x, axis, _sizes(stages))
        stages.reverse()
    for name, members in stages:
        over: Any = {"axis_index_groups": members, "tiled": True}
        x = lax.psum_scatter(x, name, scatter_dimension=axis, **over)
    return x


def exchange(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """``[shards, …]``: this shard's slice along ``axis`` of the ``x`` of every shard, in order.

    Their sum is that of a reduce-scatter, of which it sends the bytes.
    """
    number = shards.number if groups is None else groups.size
    parts = jnp.stack(jnp.split(x, number, axis))
    if groups is not None and not shards.manual:
        return _of_group(parts, shards, groups)[:, jnp.asarray(groups.position_of)[shards.index()]]
    return lax.all_to_all(
        shards.as_varying(parts),
        shards.axes,
        split_axis=0,
        concat_axis=0,
        axis_index_groups=None if groups is None else groups.members.tolist(),
        tiled=True,
    )


def turn(x: jax.Array, split: int, join: int, shards: Shards) -> jax.Array:
    """Slices along the axis ``split`` of what every shard has a slice of along ``join``."""
    return lax.all_to_all(
        shards.as_varying(x), shards.axes, split_axis=split, concat_axis=join, tiled=True
    )


def gather_parts(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """The slices of all shards, or of the group, concatenated along ``axis``.

    The result is invariant unless there are groups.
    """
    if groups is not None and not shards.manual:
        return jnp.concatenate(list(_of_group(x, shards, groups)), axis)
    stages = _schedule(shards, groups)
    inner_first = _is_inner_first(shards, groups)
    for name, members in stages if inner_first else reversed(stages):
        if members is None:
            x = _jax.all_gather(x, name, axis, has_vma=shards.has_vma)
        else:
            x = lax.all_gather(x, name, axis=axis, axis_index_groups=members, tiled=True)
    return _reordered(x, axis, _sizes(stages)[::-1]) if inner_first else x


def gather_sums(x: jax.Array, shards: Shards, groups: GroupAssignment) -> jax.Array:
    """``gather_parts`` along axis 0 of what ``scatter_sum`` returned, both to be differentiated."""
    gather = lambda x: gather_parts(x, 0, shards, groups)
    if not _jax.has_coordinator():
        return gather(x)
    # The derivative of an all-gather is a reduce-scatter, and that of an exchange an exchange.
    by_exchange = lambda x: exchange(jnp.tile(x, groups.size), 0, shards, groups).ravel()
    return shards.by_platform(x, cpu=by_exchange, default=gather)


def _of_group(x: jax.Array, shards: Shards, groups: GroupAssignment) -> jax.Array:
    """``[size, …]``: the ``x`` of each shard of this one's group, of which vmap has no gather."""
    for axis in reversed(shards.axes):
        x = lax.all_gather(x, axis)
    of_all = x.reshape(shards.number, *x.shape[len(shards.axes) :])
    return of_all[jnp.asarray(groups.members[groups.group_of])[shards.index()]]


def _is_inner_first(shards: Shards, groups: GroupAssignment | None) -> bool:
    """Whether a sum goes inside first, and a part of it over the slower network between.

    A gather goes the other way.
    """
    return groups is None and (len(shards.axes) > 1 or shards.slices > 1)


def _sizes(stages: list[Any]) -> list[int]:
    return [lax.axis_size(name) if members is None else len(members[0]) for name, members in stages]


def _reordered(x: jax.Array, axis: int, sizes: list[int]) -> jax.Array:
    """The blocks along an axis, so many of so many, with the last of them as the first."""
    blocks = x.reshape(*x.shape[:axis], *sizes, -1, *x.shape[axis + 1 :])
    count = len(sizes)
    order = [
        *range(axis),
        *range(axis + count - 1, axis - 1, -1),
        *range(axis + count, blocks.ndim),
    ]
    return blocks.transpose(order).reshape(x.shape)


def _schedule(shards: Shards, groups: GroupAssignment | None) -> list[Any]:
    return shards.scatter_schedule() if groups is None else [(shards.axes, groups.members.tolist())]
