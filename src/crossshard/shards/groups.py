"""Group assignments: which shards reduce with which."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from crossshard import _check
from crossshard.errors import GroupAssignmentError


@dataclasses.dataclass(frozen=True)
class GroupAssignment:
    """A partition of the shards 0 … N-1 into groups of equal size.

    Attributes:
      groups: one tuple of shard ids per group, in the given order.
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of shards in each group."""
        return len(self.groups[0])

    @property
    def number_of_shards(self) -> int:
        """The total number of shards."""
        return self.size * len(self.groups)

    @property
    def members(self) -> np.ndarray:
        """int[groups, size]: the shards of each group."""
        return np.array(self.groups)

    @property
    def group_of(self) -> np.ndarray:
        """int[shards]: the index of each shard's group."""
        return np.argsort(self.members.ravel()) // self.size

    @property
    def position_of(self) -> np.ndarray:
        """int[shards]: the index of each shard in its group."""
        return np.argsort(self.members.ravel()) % self.size

    def check_covers(self, number_of_shards: int) -> None:
        """Raise unless the groups are a partition of exactly this many shards."""
        if self.number_of_shards != number_of_shards:
            raise GroupAssignmentError(
                f"group_assignment {self} must be a permutation of range({number_of_shards}), "
                f"one id for each of the {number_of_shards} shards here; "
                f"it has the ids 0 to {self.number_of_shards - 1}."
            )

    def __str__(self) -> str:
        return str([list(group) for group in self.groups])


def over_all_shards(groups: GroupAssignment | None) -> bool:
    """Whether a reduction within groups is the same on every shard."""
    return groups is None or len(groups.groups) == 1


def _refuse(given: Any, why: str) -> GroupAssignmentError:
    return GroupAssignmentError(
        f"group_assignment must be a list of lists of shard ids, such as [[0, 1], [2, 3]]: {why}. "
        f"Got {_check.shown(given)}."
    )


def check_group_assignment(group_assignment: Any) -> GroupAssignment | None:
    """The checked assignment; ``None`` if all shards are one group, as for ``[]``.

    Args:
      group_assignment: a list of lists of shard ids, as TensorFlow's; no tuples and no array.

    Raises:
      GroupAssignmentError: not a list of lists of integers, not a permutation of ``range(N)``, or
        groups of different sizes.
    """
    if group_assignment is None or isinstance(group_assignment, GroupAssignment):
        return group_assignment
    if not isinstance(group_assignment, list):
        raise _refuse(group_assignment, f"{type(group_assignment).__name__} is not a list")
    if not group_assignment:
        return None
    groups: list[tuple[int, ...]] = []
    for row in group_assignment:
        if not isinstance(row, list):
            raise _refuse(group_assignment, f"{_check.shown(row)} is not a list")
        groups.append(tuple(_shard_id(i, group_assignment) for i in row))
    _check_permutation([i for group in groups for i in group], group_assignment)
    if len({len(group) for group in groups}) > 1:
        raise GroupAssignmentError(
            f"group_assignment must have groups of equal sizes, because a mean over unequal "
            f"groups would weigh their shards differently; got sizes "
            f"{[len(group) for group in groups]} in {_check.shown(group_assignment, 200)}."
        )
    return GroupAssignment(tuple(groups))


def _shard_id(value: Any, given: Any) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        what = f"the id {_check.shown(value)} is {type(value).__name__}, not an integer"
        raise _refuse(given, what)
    return int(value)


def _check_permutation(ids: Iterable[int], given: Any) -> None:
    ids = list(ids)
    repeated = sorted(i for i, times in collections.Counter(ids).items() if times > 1)
    if repeated:
        raise GroupAssignmentError(
            f"group_assignment must be a permutation of range(number of shards); "
            f"it has {repeated} more than once: {_check.shown(given, 200)}."
        )
    if not ids or sorted(ids) != list(range(len(ids))):
        raise GroupAssignmentError(
            f"group_assignment must be a permutation of range(number of shards): its {len(ids)} "
            f"ids must be 0 to {len(ids) - 1}; got {_check.shown(given, 200)}."
        )
