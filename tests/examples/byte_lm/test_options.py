"""Options: groups in both notations, and numbers that cannot be."""

import math

import pytest

from crossshard import ArgumentError, GroupAssignmentError
from examples.byte_lm.groups import parse_groups
from examples.byte_lm.options import TrainOptions


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("2x4", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("1x3", ((0, 1, 2),)),
        ("3x1", ((0,), (1,), (2,))),
        ("[[0, 3], [1, 2]]", ((0, 3), (1, 2))),
    ],
)
def test_groups_are_read(text, groups):
    assert parse_groups(text).members == groups


def test_no_groups_are_one_group_of_all():
    assert parse_groups("[]") is None
    assert TrainOptions().parsed_groups() is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("two of four", "2x4"),
        ("2x", "2x4"),
        ("0x4", "0 shards"),
        ("4x0", "0 shards"),
        ("99999x99999", "1024"),
        ("[[0,1],[1,2]]", "more than once"),
        ("[[0],[1,2]]", "equal sizes"),
        ("[[0,1],[2,9]]", "0 to 3"),
        ('{"a": 1}', "dict"),
        ("[[0.5]]", "integer"),
        ("null and void", "2x4"),
    ],
)
def test_what_is_not_a_partition_is_refused(text, names):
    with pytest.raises(GroupAssignmentError, match=names):
        parse_groups(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[" * 100_000, "100,000 characters"),
        ("[" * 15_000, "2x4"),
        ("[" * 700 + "]" * 700, "integer|2x4"),
        (f"[{list(range(30_000))}]", "characters"),
    ],
    ids=["brackets", "fewer brackets", "nested lists", "many shards"],
)
def test_what_is_too_long_or_too_deep_is_refused(text, names):
    with pytest.raises(GroupAssignmentError, match=names):
        parse_groups(text)


def test_groups_of_other_shards_are_refused():
    with pytest.raises(GroupAssignmentError, match=r"8 shards.*--shards is 4"):
        TrainOptions(groups="2x4", shards=4).parsed_groups()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch", -8),
        ("context", 0),
        ("shards", 0),
        ("shards", -1),
        ("seed", -1),
        ("seed", 2**32),
        ("learning_rate", 0.0),
        ("learning_rate", -1e-3),
        ("learning_rate", math.inf),
        ("learning_rate", math.nan),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_option(name, value):
    with pytest.raises(ArgumentError, match=f"--{name.replace('_', '-')} .*{value}"):
        TrainOptions(**{name: value}).check()


@pytest.mark.parametrize(("shards", "rows"), [(1, 16), (3, 18), (8, 16), (16, 16), (24, 24)])
def test_the_batch_suits_the_shards(shards, rows):
    assert TrainOptions().rows(shards) == rows


@pytest.mark.parametrize(("batch", "near"), [(20, "16 or 24"), (5, "--batch 8")])
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(batch, near):
    with pytest.raises(ArgumentError, match=f"{batch} rows .* 8 shards.*{near}"):
        TrainOptions(batch=batch).rows(8)
