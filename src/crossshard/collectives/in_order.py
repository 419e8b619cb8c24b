"""In order: adds the parts of virtual shards in one binary tree, whatever the number of shards.

Level by level, adjacent summands are added, and an odd last one is carried to the next level.
Each shard has adjacent summands, equally many if their number divides. It adds those that form a
whole subtree, ``2**levels`` at a time, and keeps the sums, its nodes, apart.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.collectives.sums import Bucket, by_bucket, exchange, gather_slices, split_bucket
from crossshard.shards.axes import Shards
from crossshard.shards.batch_axes import VirtualShards
from crossshard.shards.cut import Partition


def empty_sums(types: Sequence[Any], virtual: VirtualShards) -> list[jax.Array]:
    """Return the sums before a shard's first summand.

    Each is ``[levels + nodes, …]``: at each level the last sum that waits for its neighbour, and
    then the nodes.
    """
    length = virtual.levels + virtual.nodes
    return [jnp.zeros((length, *x.shape), x.dtype) for x in types]


def add_summand(
    sums: Sequence[jax.Array], summand: Sequence[jax.Array], index: jax.Array, levels: jax.Array
) -> list[jax.Array]:
    """Return the sums with one more summand.

    It is added in a loop of its own, and so read from memory: a product that XLA computed in one
    kernel with the sum would not be rounded before it is added.

    Args:
      sums: the sums before it; see ``empty_sums``.
      summand: the summand.
      index: int32[], how many summands came before it on this shard.
      levels: int32[], how many levels are added here. It must not be a constant that XLA knows,
        or the loop might be compiled differently for another number of shards.
    """

    def has_neighbour(carry: Any) -> jax.Array:
        level, _ = carry
        return (level < levels) & ((index >> level) & 1 == 1)

    def add(carry: Any) -> Any:
        level, own = carry
        waiting = (lax.dynamic_index_in_dim(x, level, 0, keepdims=False) for x in sums)
        return level + 1, [x + y for x, y in zip(waiting, own, strict=True)]

    level, total = lax.while_loop(has_neighbour, add, (jnp.int32(0), list(summand)))
    place = jnp.where(level < levels, level, levels + (index >> levels))
    put = lambda x, own: lax.dynamic_update_index_in_dim(x, own, place, 0)
    return [put(x, own) for x, own in zip(sums, total, strict=True)]


def sum_of_nodes(nodes: jax.Array) -> jax.Array:
    """Return the sum of ``[nodes, …]`` along the first axis, by the rest of the tree.

    >>> sum_of_nodes(jnp.array([1.0, 2.0, 3.0]))
    Array(6., dtype=float32)
    """
    level = list(nodes)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [x + y for x, y in pairs] + level[len(level) & ~1 :]
    return level[0]


def sum_in_order(
    xs: Sequence[jax.Array], partitions: Sequence[Partition], shards: Shards, virtual: VirtualShards
) -> list[jax.Array]:
    """Return this shard's slice of the sum of each array over the nodes of all shards.

    Every shard sends each other shard its slice of the nodes. That shard adds what it receives in
    the order of the shards; arrays that are not split are then gathered.

    Args:
      xs: ``[nodes, …]`` each.
      partitions: the partition of each sum.
      shards: the shards.
      virtual: which of the nodes there are.
    """
    if shards.num_shards == 1:
        return [sum_of_nodes(x) for x in xs]

    def move(bucket: Bucket) -> list[jax.Array]:
        split = bucket[0][1].number > 1
        packed = [_by_shard(x, each, shards.num_shards) for x, each in bucket]
        columns = packed[0] if len(packed) == 1 else jnp.concatenate(packed, axis=2)
        nodes, _, width = columns.shape
        if not width:  # all arrays are empty, since their rows travel in another array
            return [jnp.zeros(x.shape[1:], x.dtype) for x, _ in bucket]
        if not split:
            padding = -width % shards.num_shards
            columns = jnp.pad(columns[:, 0], ((0, 0), (0, padding)))
            width = (width + padding) // shards.num_shards
            columns = columns.reshape(nodes, shards.num_shards, width)
        received = exchange(columns, 1, shards).reshape(shards.num_shards * nodes, width)
        total = sum_of_nodes(virtual.filled(received))
        if not split:
            total = gather_slices(total, 0, shards)
        return split_bucket(total, bucket)

    return by_bucket(xs, partitions, shards, move)


def _by_shard(x: jax.Array, partition: Partition, number: int) -> jax.Array:
    """Return the slices of ``[nodes, …]`` as ``[nodes, shards, width]``; one if it is not split."""
    if partition.number == 1:
        return x.reshape(len(x), 1, math.prod(x.shape[1:]))
    packed = jax.vmap(partition.pack)(x)
    slices = jnp.split(packed, number, axis=1 + (partition.axis or 0))
    width = math.prod(partition.local_shape)
    return jnp.stack([each.reshape(len(x), width) for each in slices], axis=1)
