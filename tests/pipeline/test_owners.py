"""Blocks with owners: each is in the row of its owner, and comes back as it was."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from crossshard.pipeline.update import owners as module
from crossshard.pipeline.update.owners import Block, blocks_of, owners_of, take
from crossshard.shards.cut import ANY, TPU, Partition
from tests.quick import deep

NUMBER = 4
_rng = np.random.default_rng(3)
SHAPES = [(5, 7), (3,), (6, 4, 2), (), (9, 2), (2, 2)]
ARRAYS = [jnp.asarray(_rng.normal(size=shape), jnp.float32) for shape in SHAPES]
# The third is dealt out layer by layer, and the last is not dealt out.
BLOCKS: list[Block] = [(0, None), (1, None), *((2, row) for row in range(6)), (3, None), (4, None)]


@pytest.mark.parametrize(
    ("tile", "most"),
    [deep((ANY, math.inf)), (TPU, 100)],
    ids=["any", "tpu, 100"],
)
def test_every_block_is_in_one_row_which_is_that_of_its_owner(tile: module.TileShape, most: float):
    owners = owners_of({block: float(take(ARRAYS, block).size) for block in BLOCKS}, NUMBER)
    types = {block: jax.typeof(take(ARRAYS, block)) for block in BLOCKS}
    found = blocks_of(types, owners, NUMBER, tile, most)
    places = [
        (block, shard) for each in found for shard, own in enumerate(each.of_shard) for block in own
    ]
    assert sorted(places) == sorted(owners.items())
    assert (len(found) == 1) == (most == math.inf)
    # An array stays in one matrix with all its layers.
    assert sorted(place for each in found for place in each.places) == [0, 1, 2, 3, 4]
    # XLA for TPUs scatters nothing else.
    assert all(each.partition.local_shape[1] == 128 for each in found if tile is TPU)
    assert module.pack([], ARRAYS)[5] is ARRAYS[5]
    packed = jax.jit(lambda arrays: module.pack(found, arrays))(ARRAYS)
    partitions = module.packed_partitions(found, [Partition(shape) for shape in SHAPES])
    assert [x.shape for x in packed] == [each.shape for each in partitions]
    unpacked = jax.jit(lambda packed: module.unpack(found, packed))(packed)
    jax.tree.map(np.testing.assert_array_equal, unpacked, ARRAYS)

    # And a shard packs its own row.
    def own(arrays: list[jax.Array]) -> jax.Array:
        return module.pack_own(found, arrays, jax.lax.axis_index("shards"))[found[0].places[0]]

    mesh = jax.make_mesh((NUMBER,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=P("shards"), check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(ARRAYS), packed[found[0].places[0]])


def test_arrays_of_two_dtypes_are_in_two_matrices():
    types = {(0, None): jax.ShapeDtypeStruct((3,), "float32")}
    types |= {(1, None): jax.ShapeDtypeStruct((3,), "int32")}
    found = blocks_of(types, {(0, None): 0, (1, None): 1}, 2, ANY)
    assert [(each.dtype, each.places) for each in found] == [("float32", (0,)), ("int32", (1,))]


def test_no_shard_owns_much_more_than_its_part():
    for seed in range(5):
        many = np.random.default_rng(seed).integers(1, 99, 40)
        costs: dict[Block, float] = {(i, None): float(cost) for i, cost in enumerate(many)}
        owners = owners_of(costs, 7)
        loads = [sum(costs[block] for block, own in owners.items() if own == i) for i in range(7)]
        # Graham 1969: the longest first is at most a third above the best.
        assert max(loads) <= 4 / 3 * max(sum(loads) / 7, max(costs.values()))
        assert owners.keys() == costs.keys()
    # Fewer than shards leave some without any.
    assert sorted(owners_of({(0, None): 1, (1, None): 1}, 5).values()) == [0, 1]
