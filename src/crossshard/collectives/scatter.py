"""Reduce-scatter and all-gather over the shards, or over groups."""

from typing import Any

import jax
from jax import lax

from crossshard import _jax
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment


def scatter_sum(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """This shard's slice along ``axis`` of the sum over the shards or over its group."""
    for name, members in _schedule(shards, groups):
        over: Any = {"axis_index_groups": members, "tiled": True}
        x = lax.psum_scatter(x, name, scatter_dimension=axis, **over)
    return x


def gather_parts(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """The slices of all shards, or of the group, concatenated along ``axis``.

    The result is invariant unless there are groups.
    """
    for name, members in reversed(_schedule(shards, groups)):
        if members is None:
            x = _jax.all_gather(x, name, axis, has_vma=shards.has_vma)
        else:
            x = lax.all_gather(x, name, axis=axis, axis_index_groups=members, tiled=True)
    return x


def _schedule(shards: Shards, groups: GroupAssignment | None) -> list[Any]:
    return shards.scatter_schedule() if groups is None else [(shards.axes, groups.members.tolist())]
