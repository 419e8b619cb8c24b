"""All-reduce: sums over all shards or over groups, under shard_map, pmap and vmap."""

import math
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from crossshard import _check, _jax
from crossshard._annotations import Groups
from crossshard.collectives.scatter import gather_sums, scatter_sum
from crossshard.errors import ArgumentTypeError, ShardContextError
from crossshard.shards.axes import Shards, current_shards
from crossshard.shards.context import check_axis_name
from crossshard.shards.groups import GroupAssignment, check_group_assignment


def sum_over_shards(x: Any, shards: Shards, groups: GroupAssignment | None = None) -> Any:
    """The sum of ``x`` over the shards, or over the groups; the same shape and dtype.

    The result is invariant unless there are several groups.
    """
    if groups is not None:
        groups.check_covers(shards.number)
        if len(groups.groups) > 1:
            return _sum_over_group(shards.as_varying(x), shards, groups)
    if not shards.axes:
        check_bound(shards, "summed over")
        return x
    # An unreduced value is a pending sum, so it must not be cast to varying first.
    unreduced = tuple(axis for axis in shards.axes if axis in _jax.unreduced_axes(x))
    x = lax.psum(x, unreduced) if unreduced else x
    rest = tuple(axis for axis in shards.axes if axis not in unreduced)
    return lax.psum(_jax.as_varying(x, rest) if shards.has_vma else x, rest) if rest else x


def _sum_over_group(x: Any, shards: Shards, groups: GroupAssignment) -> Any:
    if groups.size == 1 or jnp.size(x) == 0:
        return x
    check_bound(shards, "summed over")
    if not shards.manual:
        parts = gather_over_shards(x, shards)[groups.members].sum(1)
        return parts[jnp.asarray(groups.group_of)[shards.index()]]
    # psum rejects groups under check_vma=True. These two accept them, and send the same bytes.
    flat = jnp.pad(jnp.ravel(x), (0, -jnp.size(x) % groups.size))
    total = gather_sums(scatter_sum(flat, 0, shards, groups), shards, groups)
    return total[: jnp.size(x)].reshape(jnp.shape(x))


def widen(x: Any) -> jax.Array:
    """``x`` in the dtype in which it is summed."""
    return jnp.asarray(x, wide(jnp.result_type(x)))


def wide(dtype: Any) -> Any:
    """The dtype in which one is summed: float32 for those of 16 bits, which overflow or round."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def gather_over_shards(x: Any, shards: Shards) -> jax.Array:
    """``[shards, …]``: the ``x`` of every shard, in order."""
    # One axis at a time: under vmap, all_gather does not accept a tuple of axes.
    for axis in reversed(shards.axes):
        x = lax.all_gather(x, axis)
    depth = len(shards.axes)
    return x.reshape(math.prod(x.shape[:depth]), *x.shape[depth:])


def check_bound(shards: Shards, done: str) -> None:
    """Raise ShardContextError if several shards have no mesh axis over which anything is done."""
    if shards.number > 1 and not shards.axes:
        raise ShardContextError(
            f"The shard context has {shards.number} shards, but no mesh axis is bound here, so "
            f"nothing can be {done} them. Run the step with "
            f"crossshard.shard(num_shards={shards.number}), or inside jax.shard_map."
        )


def cross_replica_sum(
    x: ArrayLike,
    group_assignment: Groups | None = None,
    name: str | None = None,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """The sum of ``x`` over all shards, or over this shard's group.

    Its gradient is the ``cross_replica_sum`` of the incoming gradient over the same groups, in
    every mode. The result is therefore varying under ``check_vma=True``; use ``jax.lax.psum`` if
    you need an invariant one.

    Args:
      x: a numeric array, of the same shape on all shards.
      group_assignment: a partition of the shards into groups of equal size; all shards if ``None``.
      name: the name of its scope in profiles and HLO.
      axis_name: the mesh axes of the shards, if they cannot be inferred.

    Returns:
      An array of the shape and dtype of ``x``.

    Raises:
      ArgumentTypeError: ``x`` is not a numeric array.
      GroupAssignmentError: the groups are not a partition of the shards.

    >>> import jax, jax.numpy as jnp
    >>> jax.vmap(cross_replica_sum, axis_name="shards")(jnp.arange(4.0))
    Array([6., 6., 6., 6.], dtype=float32)
    """
    shards = current_shards(check_axis_name(axis_name), what="cross_replica_sum")
    groups = check_group_assignment(group_assignment)
    x = check_numeric(x, "cross_replica_sum")
    with scope(name, "cross_replica_sum"):
        return shards.as_varying(sum_over_shards(shards.as_varying(x), shards, groups))


def check_numeric(x: Any, function: str) -> jax.Array:
    """``x`` as a numeric array, or an error that names ``function``."""
    array = _check.as_array(f"The array of {function}", x)
    if not jnp.issubdtype(array.dtype, jnp.number):
        raise ArgumentTypeError(f"{function} takes an array of numbers; got one of {array.dtype}.")
    return array


def scope(name: str | None, function: str) -> AbstractContextManager[object]:
    """The scope of a collective in profiles and HLO, under its own name if none is given."""
    return jax.named_scope(function if name is None else _check.word("name", name))
