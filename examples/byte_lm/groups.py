"""The groups of shards on the command line."""

import dataclasses
import json
import re

import numpy as np
import optax

from crossshard import CrossShardOptimizer
from crossshard.errors import GroupAssignmentError

# Virtual CPU devices are threads and buffers; more would overload a machine.
MOST_SHARDS = 1024
_LONGEST = 20_000


@dataclasses.dataclass(frozen=True)
class Groups:
    """A partition of the shards into groups of one size.

    Attributes:
      members: the shards of each group.
    """

    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of shards in each group."""
        return len(self.members[0])

    @property
    def shards(self) -> int:
        """The number of shards in all groups."""
        return self.size * len(self.members)

    @property
    def group_of(self) -> np.ndarray:
        """int[shards]: the group that each shard is in."""
        return np.argsort(np.ravel(self.members)) // self.size

    @property
    def position_of(self) -> np.ndarray:
        """int[shards]: each shard's position within its group."""
        return np.argsort(np.ravel(self.members)) % self.size


def parse_groups(text: str) -> Groups | None:
    """The groups in ``2x4`` (two groups of four neighbours) or in a JSON list of lists.

    Raises:
      GroupAssignmentError: neither form, or not a partition into groups of one size.
    """
    product = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip())
    if product:
        number, size = int(product[1]), int(product[2])
        if not 0 < number * size <= MOST_SHARDS:
            raise GroupAssignmentError(
                f"--groups {text} makes {number * size} shards; 1 to {MOST_SHARDS} are possible."
            )
        return Groups(tuple(tuple(range(g * size, (g + 1) * size)) for g in range(number)))
    if len(text) > _LONGEST:
        raise GroupAssignmentError(
            f"--groups has {len(text):,} characters; groups of up to {MOST_SHARDS} shards need "
            f"fewer than {_LONGEST:,}."
        )
    try:
        listed = json.loads(text)
        # Raises unless this is a partition into groups of one size.
        CrossShardOptimizer(optax.identity(), group_assignment=listed)
    except (json.JSONDecodeError, RecursionError):
        raise GroupAssignmentError(
            f"--groups must be like 2x4 (two groups of four) or JSON like [[0,1],[2,3]]; "
            f"got {text if len(text) < 80 else f'{text[:80]}…'!r}."
        ) from None
    return Groups(tuple(map(tuple, listed))) if listed else None
