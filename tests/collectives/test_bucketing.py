"""Buckets in tiles, as on TPUs: sums and gathers of arrays of any size, and how they are padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from crossshard.collectives.sums import bucketed_gather, bucketed_sum, gather_slices, scatter_sum
from crossshard.shards.axes import Shards
from crossshard.shards.cut import ANY, TPU, TileShape, partition_for

MESH = jax.make_mesh((8,), ("s",), axis_types=(AxisType.Auto,))
# In two stages, as on a torus.
SHARDS = Shards(8, ("s",), manual=True, torus_factors=(4, 2))
# In three, the two inside of a slice first; over two axes, the last one first.
SLICES = Shards(8, ("s",), manual=True, torus_factors=(2, 2, 2), slices=2)
AXES = Shards(8, ("host", "chip"), manual=True)

ARRAYS = {
    "one that is not a multiple of rows": [(1030,)],
    "one matrix of few rows": [(3, 700)],
    "small ones together": [(1030,), (40, 30), (5000,)],
    "small and tiny ones": [(1030,), (7,), ()],
    "one that travels alone, beside a small one": [(256, 128), (1030,)],
    "one in tiles": [(8 * 16 * 128 * 8 + 5,)],
}


@pytest.mark.parametrize("tile", [ANY, TPU, TileShape(2, 4)], ids=str)
@pytest.mark.parametrize("shapes", ARRAYS.values(), ids=ARRAYS)
def test_sums_and_gathers_are_numpys(shapes: list[tuple[int, ...]], tile: TileShape):
    rng = np.random.default_rng(0)
    # Small integers, whose sums are not rounded.
    each = [rng.integers(-9, 9, (8, *shape)).astype(np.float32) for shape in shapes]
    partitions = [partition_for(shape, 8, tile) for shape in shapes]

    @jax.jit
    @jax.shard_map(mesh=MESH, in_specs=P("s"), out_specs=P(), check_vma=False)
    def summed(xs: list[jax.Array]) -> list[jax.Array]:
        parts = bucketed_sum([x[0] for x in xs], partitions, SHARDS)
        return bucketed_gather(parts, partitions, SHARDS)

    for got, want in zip(summed(list(map(jnp.asarray, each))), each, strict=True):
        np.testing.assert_array_equal(got, want.sum(0))


@pytest.mark.parametrize("shards", [SHARDS, SLICES, AXES], ids=["torus", "slices", "axes"])
@pytest.mark.parametrize("axis", [0, 1])
def test_each_shard_has_the_slice_at_its_index(shards: Shards, axis: int):
    sizes = (8,) if len(shards.axes) == 1 else (2, 4)
    mesh = jax.make_mesh(sizes, shards.axes, axis_types=(AxisType.Auto,) * len(sizes))
    each = np.random.default_rng(0).integers(-9, 9, (8, 16, 24)).astype(np.float32)
    split = P(*[None] * axis, shards.axes)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(shards.axes), out_specs=(split, P()), check_vma=False)
    def found(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = scatter_sum(x[0], axis, shards)
        return part, gather_slices(part, axis, shards)

    for got in found(each):
        np.testing.assert_array_equal(got, each.sum(0))


@pytest.mark.parametrize(
    ("width", "padded"),
    # To a tile of 2,048 where this adds a sixteenth at most, else to a row of 128.
    [(2048, 2048), (20000, 20480), (1900, 1920), (768, 768), (64, 128), (1, 128)],
)
def test_how_a_slice_is_padded(width: int, padded: int):
    assert width + TPU.padding(width) == padded


def test_other_devices_pad_nothing():
    assert {ANY.padding(width) for width in range(100)} == {0}
