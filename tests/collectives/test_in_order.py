"""The tree in which virtual shards are added, against the same tree in numpy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossshard.collectives import in_order
from crossshard.shards.batch_axes import VirtualShards
from tests.quick import deep_but


def tree_sum(leaves: list[Any]) -> Any:
    """Adjacent pairs are added, and an odd last one is carried, until one is left."""
    while len(leaves) > 1:
        pairs = [x + y for x, y in zip(leaves[::2], leaves[1::2], strict=False)]
        leaves = pairs + leaves[2 * len(pairs) :]
    return leaves[0]


@functools.partial(jax.jit, static_argnums=1)
def nodes(leaves: jax.Array, virtual: VirtualShards) -> jax.Array:
    """What a shard with these summands sends."""
    sums = in_order.empty_sums([jax.ShapeDtypeStruct(leaves.shape[1:], jnp.float32)], virtual)
    for index, leaf in enumerate(leaves):
        levels = jnp.int32(virtual.levels)
        sums = in_order.add_summand(sums, [leaf], jnp.int32(index), levels)
    return sums[0][virtual.levels :]


@pytest.mark.parametrize("virtual", deep_but([1, 6], [1, 2, 5, 6, 8, 12, 24]))
def test_every_number_of_shards_has_the_sum_of_one_tree(virtual: int):
    leaves = np.random.default_rng(0).normal(size=(virtual, 9)).astype(np.float32)
    wanted = tree_sum(list(leaves))
    # Which the order of the terms decides.
    assert virtual < 5 or not np.array_equal(wanted, np.add.accumulate(leaves)[-1])
    for number in range(1, virtual + 1):
        dealt = VirtualShards(virtual, number)
        # As numpy splits rows that do not divide.
        for shard, own in enumerate(np.array_split(np.arange(virtual), number)):
            assert (dealt.first(shard), dealt.count(shard)) == (own[0], len(own))
            assert dealt.first(jnp.int32(shard)) == own[0]
        found = [nodes(own, dealt) for own in np.array_split(leaves, number)]
        assert all(len(own) == dealt.nodes for own in found)
        filled = dealt.filled(jnp.concatenate(found))
        np.testing.assert_array_equal(in_order.sum_of_nodes(filled), wanted)


@pytest.mark.parametrize(("count", "sent"), [(1, 1), (2, 1), (3, 3), (6, 3), (8, 1), (12, 3)])
def test_a_shard_sends_the_odd_part_of_its_number(count: int, sent: int):
    assert VirtualShards(5 * count, 5).nodes == sent
    assert VirtualShards(5 * count + 1, 5).nodes == count + 1
