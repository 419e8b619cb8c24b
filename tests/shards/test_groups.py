"""Group assignments are checked before anything is traced."""

from typing import Any

import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer
from crossshard.errors import GroupAssignmentError
from crossshard.shards.axes import GroupAssignment, check_group_assignment

# What is given, and what the message must say of it.
BAD = {
    "a number": (3, "int is not a list"),
    "a string": ("01", "str is not a list"),
    "a generator": (iter([[0, 1]]), "is not a list"),
    "one flat list": ([0, 1], "0 is not a list"),
    "lists and numbers": ([[0, 1], 2], "2 is not a list"),
    "three levels": ([[[0, 1], [2, 3]]], "not an integer"),
    "a bool": ([[0, True]], "the id True is bool, not an integer"),
    "floats": ([[0.0, 1.0]], "the id 0.0 is float, not an integer"),
    "an array": (np.array([[0, 2], [1, 3]]), "ndarray is not a list"),
    "a tuple": (((0, 2), (1, 3)), "tuple is not a list"),
    "a list of tuples": ([(0, 2), [1, 3]], "(0, 2) is not a list"),
    "None": ([[0, None]], "NoneType, not an integer"),
    "twice in a group": ([[0, 0], [1, 1]], "has [0, 1] more than once"),
    "in two groups": ([[0, 1], [1, 2]], "has [1] more than once"),
    "an id left out": ([[0, 1], [2, 4]], "permutation of range"),
    "counted from one": ([[1, 2], [3, 4]], "permutation of range"),
    "negative": ([[-1, 0]], "permutation of range"),
    "one empty group": ([[]], "its groups are empty"),
    "unequal sizes": ([[0], [1, 2, 3]], "equal sizes"),
    "ragged": ([[0, 1, 2], [3, 4, 5], [6, 7]], "and have [3, 3, 2]"),
}


@pytest.mark.parametrize(("groups", "why"), BAD.values(), ids=BAD)
def test_what_is_no_partition_into_equal_groups_is_a_value_error(groups: Any, why: str):
    with pytest.raises(GroupAssignmentError) as caught:
        check_group_assignment(groups)
    assert isinstance(caught.value, ValueError)
    assert why in str(caught.value)
    assert "group_assignment must" in str(caught.value)


@pytest.mark.parametrize("groups", [BAD[name][0] for name in ("a number", "in two groups")])
def test_the_optimizer_looks_at_its_groups_at_construction(groups: Any):
    with pytest.raises(GroupAssignmentError):
        CrossShardOptimizer(optax.sgd(1.0), group_assignment=groups)


def test_the_order_of_checks_is_the_originals():
    # A flat list that also repeats itself is no list of lists; repeats come before sizes.
    with pytest.raises(GroupAssignmentError, match="is not a list"):
        check_group_assignment([0, 0])
    with pytest.raises(GroupAssignmentError, match="more than once"):
        check_group_assignment([[0, 0], [1]])


GOOD = [
    [[0, 2], [1, 3]],
    [[np.int64(0), np.int32(2)], [1, 3]],
    np.array([[0, 2], [1, 3]]).tolist(),
]


@pytest.mark.parametrize("groups", GOOD, ids=range(len(GOOD)))
def test_lists_are_one_assignment(groups: Any):
    checked = check_group_assignment(groups)
    assert checked == GroupAssignment(((0, 2), (1, 3)))
    assert check_group_assignment(checked) is checked
    assert str(checked) == "[[0, 2], [1, 3]]"


@pytest.mark.parametrize("groups", [None, []])
def test_no_groups_means_all_shards(groups: Any):
    assert check_group_assignment(groups) is None


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_coverage_is_checked_against_the_number_of_shards(shards: int):
    groups = GroupAssignment(((0, 2), (1, 3)))
    with pytest.raises(GroupAssignmentError, match=rf"permutation of range\({shards}\)"):
        groups.check_covers(shards)
    groups.check_covers(4)


def test_who_is_in_which_group():
    groups = GroupAssignment(((4, 0, 2), (1, 5, 3)))
    assert (groups.size, groups.number_of_shards) == (3, 6)
    np.testing.assert_array_equal(groups.members, [[4, 0, 2], [1, 5, 3]])
    np.testing.assert_array_equal(groups.group_of, [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(groups.position_of, [1, 0, 2, 2, 0, 1])
    for shard in range(6):
        assert groups.members[groups.group_of[shard], groups.position_of[shard]] == shard
