"""Evidence: the updates of N shards, of one device, and of one device with each shard's rows."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from crossshard.tools.verification.arithmetic import norm
from crossshard.tools.verification.report import Fault


@dataclasses.dataclass(frozen=True)
class Case:
    """The updates of one group of shards, of one parameter or of several.

    They are divided by the learning rate, in float64 and flat.

    Attributes:
      many: ``[copies, size]``, of N shards; one copy if all shards have the same.
      one: ``[size]``, of one device with all rows of the group: what is wanted.
      own: ``[shards, size]``, of one device with each shard's rows; ``None`` if it was not run.
      members: the numbers of these shards.
      of_all: the number of shards in all groups.
      rows: those of this group.
      tolerance: the relative difference that is rounding.
      noise: the norm of a difference that is rounding or chance.
      noise_of_own: by how much more noise there is in ``own``.
      is_random: whether the updates are means of several, with other random keys each.
    """

    many: np.ndarray
    one: np.ndarray
    own: np.ndarray | None
    members: tuple[int, ...]
    of_all: int
    rows: int
    tolerance: float
    noise: float
    noise_of_own: float
    is_random: bool

    @property
    def number(self) -> int:
        """The number of shards in this group."""
        return len(self.members)

    @property
    def update(self) -> np.ndarray:
        """The update, where the copies agree."""
        return self.many[0]

    @property
    def ratio(self) -> float | None:
        """The update over that of one device, by least squares."""
        square = float(self.one @ self.one)
        return float(self.update @ self.one) / square if square else None

    @property
    def residual(self) -> float:
        """What the ratio leaves, relative to the update."""
        scale = norm(self.update)
        return norm(self.update - (self.ratio or 0) * self.one) / scale if scale else 0.0

    @property
    def copies_differ(self) -> bool:
        """Whether copies differ by more than rounding."""
        scale = norm(self.many[0]) + norm(self.one)
        return any(norm(x - self.many[0]) > 1e-5 * scale for x in self.many[1:])

    def is_mean_of_own(self) -> bool:
        """Whether the update is the mean of what each shard does alone."""
        if self.own is None:
            return False
        off, mean = self.noise_of_own * self.noise, self.own.mean(axis=0)
        scale = max(norm(self.update), norm(mean))
        return norm(self.update - mean) <= self.tolerance * scale + off

    def close(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Whether two updates are equal, up to rounding and chance."""
        scale = max(norm(one), norm(other))
        return norm(one - other) <= self.tolerance * scale + self.noise


def joined(cases: Sequence[Case]) -> Case:
    """Several parameters of one group as if they were one; the copies of each agree."""
    own = [case.own for case in cases if case.own is not None]
    return dataclasses.replace(
        cases[0],
        many=np.concatenate([case.update for case in cases])[None],
        one=np.concatenate([case.one for case in cases]),
        own=np.concatenate(own, axis=1) if own else None,
        tolerance=max(case.tolerance for case in cases),
        noise=norm(np.array([case.noise for case in cases])),
    )


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its path in the state, its shape on one device, and a case for each group."""

    name: str
    shape: tuple[int, ...]
    cases: tuple[Case, ...]


@dataclasses.dataclass(frozen=True)
class AtOneKey:
    """What is known of a random step from other rows at the same key, whatever the noise.

    Attributes:
      keys_are_equal: whether shards that swap their rows leave the step as it is.
      without_effect: the shards whose rows do not matter to a parameter, by its name.
    """

    keys_are_equal: bool = False
    without_effect: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All that was measured.

    Attributes:
      number: the number of shards.
      rows: those of the batch.
      leaves: what an update changes.
      has_statistics: whether a step changes other real numbers, too, such as those of batch norm.
      beside: what is wrong with these, and with metrics.
      samples: of so many runs, with other random keys each, updates are the mean.
      at_one_key: what is known beside, if they are several.
      counters: words for counters that are others on N shards and make the difference, if any do.
      notes: what could not be measured, and what is no fault.
    """

    number: int
    rows: int
    leaves: tuple[Leaf, ...]
    has_statistics: bool
    beside: tuple[Fault, ...]
    samples: int
    at_one_key: AtOneKey
    counters: str
    notes: tuple[str, ...]
