"""Options: batches that suit the shards."""

import pytest

from crossshard.errors import ArgumentError
from examples.byte_lm.options import TrainOptions


@pytest.mark.parametrize(("shards", "rows"), [(1, 16), (3, 18), (8, 16), (16, 16), (24, 24)])
def test_the_batch_suits_the_shards(shards, rows):
    assert TrainOptions().rows(shards) == rows


@pytest.mark.parametrize(("batch", "near"), [(20, "--batch 16"), (5, "--batch 8")])
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(batch, near):
    with pytest.raises(ArgumentError, match=f"{batch} rows .* 8 shards.*{near}"):
        TrainOptions(batch=batch).rows(8)
