"""Evidence: the updates of N shards, of one device, and of one device with each shard's rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossshard.tools.verification.built_step import Factory


@dataclasses.dataclass(frozen=True)
class LeafEvidence:
    """The updates of one parameter, divided by the learning rate, in float64 and flat.

    Attributes:
      name: its path in the state.
      shape: its shape on one device.
      many: ``[copies, size]``, of N shards; one copy if all shards have the same.
      one: ``[groups, size]``, of one device with all rows of each group.
      own: ``[shards, size]``, of one device with each shard's rows; ``None`` if it was not run.
      noise: the rounding of the subtraction, and of the mean of random steps, as a norm.
      epsilon: the relative rounding of its dtype.
    """

    name: str
    shape: tuple[int, ...]
    many: np.ndarray
    one: np.ndarray
    own: np.ndarray | None
    noise: float
    epsilon: float


@dataclasses.dataclass(frozen=True)
class StateEvidence:
    """An array of the state that is no parameter, or a metric: the same, but as it is."""

    name: str
    many: np.ndarray
    one: np.ndarray
    own: np.ndarray | None
    is_stacked: bool


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All that was measured.

    Attributes:
      groups: the shards that reduce together.
      rows: those of the batch.
      parameters: what an update changes.
      others: statistics and the like.
      metrics: what the step returns besides.
      is_random: whether other keys make another step.
      keys_are_equal: whether shards that swap their rows leave a random step as it is.
      notes: what could not be measured.
    """

    groups: tuple[tuple[int, ...], ...]
    rows: int
    parameters: tuple[LeafEvidence, ...]
    others: tuple[StateEvidence, ...]
    metrics: tuple[StateEvidence, ...]
    is_random: bool
    keys_are_equal: bool
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be verified.

    Attributes:
      many: the factory of the step on N shards.
      one: the factory of the step on one device, which may be the same.
      batch: the arguments after the state.
      key: the random key; ``None`` if the step takes none.
      groups: the shards that reduce together.
      factor: by which the update on N shards should differ: the size of a group under SUM.
    """

    many: Factory
    one: Factory
    batch: Sequence[Any]
    key: Any
    groups: tuple[tuple[int, ...], ...]
    factor: float = 1.0

    @property
    def number(self) -> int:
        """The number of shards."""
        return sum(map(len, self.groups))
