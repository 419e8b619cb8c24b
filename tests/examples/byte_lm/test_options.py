"""Options: groups in both notations, and batches that suit the shards."""

import pytest

from crossshard.errors import ArgumentError, GroupAssignmentError
from examples.byte_lm.options import TrainOptions, parse_groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("2x4", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("1x3", ((0, 1, 2),)),
        ("3x1", ((0,), (1,), (2,))),
        ("[[0, 3], [1, 2]]", ((0, 3), (1, 2))),
        ("[]", ()),
    ],
)
def test_groups_are_read(text, groups):
    assert parse_groups(text) == groups


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("two of four", "2x4"),
        ("2x", "2x4"),
        ("0x4", "2x4"),
        ("4x0", "2x4"),
        ("99999x99999", "2x4"),
        ("[[0,1],[1,2]]", "more than once"),
        ("[[0],[1,2]]", "equal sizes"),
        ("[[0,1],[2,9]]", "0 to 3"),
        ('{"a": 1}', "dict"),
        ("[[0.5]]", "integer"),
        ("null and void", "2x4"),
        ("[" * 100_000, "2x4"),
        ("[" * 700 + "]" * 700, "integer|2x4"),
    ],
    ids=lambda value: value[:15],
)
def test_what_is_not_a_partition_is_refused(text, names):
    with pytest.raises(GroupAssignmentError, match=names):
        parse_groups(text)


@pytest.mark.parametrize(("shards", "rows"), [(1, 16), (3, 18), (8, 16), (16, 16), (24, 24)])
def test_the_batch_suits_the_shards(shards, rows):
    assert TrainOptions().rows(shards) == rows


@pytest.mark.parametrize(("batch", "near"), [(20, "--batch 16"), (5, "--batch 8")])
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(batch, near):
    with pytest.raises(ArgumentError, match=f"{batch} rows .* 8 shards.*{near}"):
        TrainOptions(batch=batch).rows(8)
