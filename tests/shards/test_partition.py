"""Partitions of stacked layers: a slice of the stack is the stack of slices of the layers."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from crossshard.shards.cut import (
    ANY,
    TPU,
    Partition,
    partition_along_axis,
    partition_for,
)


@pytest.mark.parametrize("make", [partition_for, partition_along_axis])
@pytest.mark.parametrize("tile", [ANY, TPU])
@pytest.mark.parametrize(
    "shape", [(3, 256, 192), (4, 256, 192), (8, 192, 256), (2, 3, 192, 256), (2, 4, 192, 256)]
)
def test_a_row_of_a_part_is_a_part_of_the_row(shape: tuple[int, ...], tile: object, make: object):
    partition = make(shape, 4, tile)
    row = partition.row
    assert row is not None
    assert row.number == 4
    assert row.shape == shape[1:]
    assert row.local_shape == partition.local_shape[1:]
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for index in range(4):
        part = partition.local_slice(array, index)
        for place in range(shape[0]):
            want = row.local_slice(array[place], index)
            np.testing.assert_array_equal(part[place], want)


def test_a_tpu_gets_parts_with_enough_rows():
    # Of 32 rows over 4 shards 8 each are too few, and 512 are enough.
    for make in (partition_for, partition_along_axis):
        assert make((3, 32, 2048), 4, TPU).axis == 2
        assert make((3, 32, 2048), 4, ANY).axis == 1


def test_beside_products_parts_are_columns():
    tile = dataclasses.replace(TPU, by_columns=True)
    assert partition_along_axis((3, 512, 2048), 4, tile).axis == 2
    assert partition_along_axis((512, 2048), 4, tile).axis == 1
    # Of 256 columns over 4 shards each has less than a row of lanes.
    assert partition_along_axis((512, 256), 4, tile).axis == 0
    assert partition_along_axis((2048,), 4, tile).axis == 0
    taken = partition_along_axis((512, 2048), 4, tile, P(None, "model"))
    assert (taken.axis, taken.other_axes) == (0, P(None, "model"))


def test_what_has_no_rows():
    assert partition_for((4, 64, 64), 4).row is None, "too small for a collective"
    assert partition_for((1024, 64, 64), 4).row is None, "too many to be layers"
    assert partition_for((3, 183, 183), 4).row is None, "nothing within a layer divides"
    assert partition_for((1024, 256), 4).row is None, "split along the first axis"
    assert Partition((40000,)).row is None, "a vector"
    assert Partition((4, 192, 192), 1, other_axes=P("model")).row is None, "dealt out"


def test_what_is_whole_has_whole_rows():
    assert Partition((300, 192, 192)).row == Partition((192, 192))
    assert Partition((4, 40000)).row == Partition((40000,))


def test_a_row_keeps_its_own_other_axes():
    over = partition_for((4, 192, 256), 4, other_axes=P(None, "model"))
    assert (over.axis, over.row.axis, over.row.other_axes) == (2, 1, P("model"))
    assert over.row.of_block({"model": 2}).local_shape == (96, 64)
    last = partition_for((4, 192, 256), 4, other_axes=P(None, None, "model"))
    assert (last.axis, last.row.axis, last.row.other_axes) == (1, 0, P(None, "model"))
