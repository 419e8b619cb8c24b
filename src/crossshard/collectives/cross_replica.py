"""TensorFlow's collectives: cross_replica_sum, all_to_all and collective_permute, in any mode."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from crossshard import _check
from crossshard._annotations import Groups
from crossshard.collectives.sums import (
    check_bound,
    gather_over_group,
    gather_over_shards,
    sum_over_shards,
)
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.shards.axes import (
    GroupAssignment,
    Shards,
    check_axis_name,
    check_group_assignment,
    current_shards,
)


def cross_replica_sum(
    x: ArrayLike,
    group_assignment: Groups | None = None,
    name: str | None = None,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Sum ``x`` over all shards, or over this shard's group.

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
    shards = _shards("cross_replica_sum", axis_name, check_group_assignment(group_assignment))
    x = _numeric(x, "cross_replica_sum")
    with _scope(name, "cross_replica_sum"):
        return shards.as_varying(sum_over_shards(shards.as_varying(x), shards))


def all_to_all(
    x: ArrayLike,
    concat_dimension: int,
    split_dimension: int,
    split_count: int,
    group_assignment: Groups | None = None,
    name: str | None = None,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Split ``x``, send one block to each shard of the group, and concatenate those received.

    Args:
      x: an array whose ``split_dimension`` is a multiple of ``split_count``.
      concat_dimension: the dimension along which the received blocks are concatenated.
      split_dimension: the dimension along which ``x`` is split.
      split_count: the number of blocks, which is the number of shards in a group.
      group_assignment: a partition of the shards into groups of equal size; all shards if ``None``.
      name: the name of its scope in profiles and HLO.
      axis_name: the mesh axes of the shards, if they cannot be inferred.

    Returns:
      An array with ``split_dimension`` divided and ``concat_dimension`` multiplied by
      ``split_count``: ``[8, 4]`` with split 0, concat 1, count 4 becomes ``[2, 16]``.

    Raises:
      ArgumentError: a dimension that ``x`` does not have, or a ``split_count`` other than the
        group size.
      GroupAssignmentError: the groups are not a partition of the shards.

    >>> import jax, jax.numpy as jnp
    >>> exchange = lambda x: all_to_all(x, concat_dimension=1, split_dimension=0, split_count=4)
    >>> jax.vmap(exchange, axis_name="shards")(jnp.zeros((4, 8, 4))).shape
    (4, 2, 16)
    """
    shards = _shards("all_to_all", axis_name, check_group_assignment(group_assignment))
    x = _numeric(x, "all_to_all")
    concat = _dimension(x, concat_dimension, "concat_dimension")
    split = _dimension(x, split_dimension, "split_dimension")
    if _check.whole_number("split_count", split_count, least=None) != shards.group_size:
        raise ArgumentError(
            f"split_count must be the number of shards in a group, {shards.group_size}; "
            f"got {split_count!r}."
        )
    if x.shape[split] % split_count:
        raise ArgumentError(
            f"split_dimension {split} of an array of shape {x.shape} has length "
            f"{x.shape[split]}, which is not divisible by {split_count} shards."
        )
    with _scope(name, "all_to_all"):
        if shards.group_size == 1:
            return x
        check_bound(shards, "exchanged between")
        if shards.manual:
            return lax.all_to_all(
                shards.as_varying(x),
                shards.axes,
                split,
                concat,
                axis_index_groups=shards.members,
                tiled=True,
            )
        gathered = gather_over_group(x, shards)
        blocks = jnp.stack(jnp.split(gathered, split_count, axis=split + 1))
        return jnp.concatenate(list(blocks[shards.index_in_group()]), axis=concat)


def collective_permute(
    x: ArrayLike,
    source_target_pairs: Sequence[Sequence[int]],
    name: str | None = None,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Send ``x`` from each source shard to its target; shards that are not a target get zeros.

    Args:
      x: an array, of the same shape on all shards.
      source_target_pairs: ``[[source, target], …]``, each source and each target at most once.
      name: the name of its scope in profiles and HLO.
      axis_name: the mesh axes of the shards, if they cannot be inferred.

    Returns:
      An array of the shape and dtype of ``x``.

    Raises:
      ArgumentError: a shard that does not exist, or a source or target that is given twice.
      ArgumentTypeError: the pairs are not pairs of integers.

    >>> import jax, jax.numpy as jnp
    >>> send = lambda x: collective_permute(x, [[0, 1], [1, 2]])
    >>> jax.vmap(send, axis_name="shards")(jnp.array([5.0, 7.0, 9.0]))
    Array([0., 5., 7.], dtype=float32)
    """
    shards = _shards("collective_permute", axis_name)
    x = _numeric(x, "collective_permute")
    pairs = _check_pairs(source_target_pairs, shards.num_shards)
    with _scope(name, "collective_permute"):
        if not shards.axes:
            check_bound(shards, "sent between")
            return x if pairs else jnp.zeros_like(x)
        if shards.manual:
            return lax.ppermute(shards.as_varying(x), shards.axes, pairs)
        # Under vmap, ppermute needs a full permutation, so gather and index instead.
        source_of = np.full(shards.num_shards, -1)
        source_of[[target for _, target in pairs]] = [source for source, _ in pairs]
        source = jnp.asarray(source_of)[shards.index()]
        received = gather_over_shards(x, shards)[source]
        return jnp.where(source >= 0, received, jnp.zeros_like(received))


def _dimension(x: jax.Array, dimension: Any, name: str) -> int:
    dimension = _check.whole_number(name, dimension, least=None)
    if not -x.ndim <= dimension < x.ndim:
        raise ArgumentError(f"{name} {dimension} does not exist in an array of shape {x.shape}.")
    return dimension % x.ndim


def _check_pairs(pairs: Any, number: int) -> list[tuple[int, int]]:
    is_table = isinstance(pairs, list | tuple | np.ndarray)
    try:
        table = np.asarray(pairs if is_table and len(pairs) else np.zeros((0, 2), int))
    except (TypeError, ValueError):
        is_table = False
    if (
        not is_table
        or table.ndim != 2
        or table.shape[1] != 2
        or not np.issubdtype(table.dtype, np.integer)
    ):
        raise ArgumentTypeError(
            f"source_target_pairs must be a list of [source, target] pairs of ints; got "
            f"{_check.shown(pairs)}."
        )
    for name, ids in (("source", table[:, 0]), ("target", table[:, 1])):
        outside = [int(i) for i in ids if not 0 <= i < number]
        if outside:
            raise ArgumentError(
                f"source_target_pairs names the {name} {outside[0]}, but the shards are 0 to "
                f"{number - 1}: {pairs!r}."
            )
        if len(set(ids.tolist())) != len(ids):
            raise ArgumentError(f"source_target_pairs names a {name} twice: {pairs!r}.")
    return [(int(source), int(target)) for source, target in table]


def _shards(function: str, axis_name: Any, groups: GroupAssignment | None = None) -> Shards:
    return current_shards(check_axis_name(axis_name), groups, what=function)


def _numeric(x: Any, function: str) -> jax.Array:
    """Return ``x`` as a numeric array, or raise an error that names ``function``."""
    array = _check.as_array(f"The array of {function}", x)
    if not jnp.issubdtype(array.dtype, jnp.number):
        raise ArgumentTypeError(f"{function} takes an array of numbers; got one of {array.dtype}.")
    return array


def _scope(name: str | None, function: str) -> AbstractContextManager[object]:
    """Return the scope of a collective in profiles and HLO, under its own name if none is given."""
    return jax.named_scope(function if name is None else _check.word("name", name))
