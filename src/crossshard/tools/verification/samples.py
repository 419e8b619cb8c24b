"""Samples: the mean of an array over runs with other random keys, and how exact it is."""

import dataclasses

import numpy as np

# What is further off than so many standard errors is no chance.
_ERRORS = 4.0
_ROUNDING = 1e-5


@dataclasses.dataclass
class Mean:
    """An array in one run or the mean of several: on N shards, on one device, and of each shard.

    What N shards have is compared with what one device has in the same run, so that what differs
    from run to run and is the same on both, such as a schedule, hides nothing.

    Attributes:
      number: of how many runs.
      is_stacked: whether N shards have an array ``[shards, …]`` of it.
      rounding: the norm of a difference that is the rounding of what it was computed from.
    """

    number: int = 0
    is_stacked: bool = False
    rounding: float = 0.0
    _number_of_own: int = 0
    _many: np.ndarray | float = 0.0
    _one: np.ndarray | float = 0.0
    _own: np.ndarray | float = 0.0
    _off: np.ndarray | float = 0.0
    _square: np.ndarray | float = 0.0

    def add(self, many: np.ndarray, one: np.ndarray) -> None:
        """Add a run.

        Args:
          many: float64[copies, size]: on N shards; one copy if all have the same.
          one: float64[groups, size]: on one device with the rows of each group.
        """
        off = many[:, None] - one
        self.number += 1
        # Copies may agree in one run and not in the next.
        self._many, self._one = self._many + many, self._one + one
        self._off, self._square = self._off + off, self._square + off**2

    def add_own(self, own: np.ndarray) -> None:
        """Add runs with each shard's rows, float64[shards, size]; they may be fewer."""
        self._number_of_own += 1
        self._own = self._own + own

    @property
    def many(self) -> np.ndarray:
        """float64[copies, size]."""
        return np.asarray(self._many / self.number)

    @property
    def one(self) -> np.ndarray:
        """float64[groups, size]."""
        return np.asarray(self._one / self.number)

    @property
    def own(self) -> np.ndarray | None:
        """float64[shards, size], if it was run."""
        return np.asarray(self._own / self._number_of_own) if self._number_of_own else None

    @property
    def chance(self) -> np.ndarray:
        """float64[copies, groups]: the norms of differences that may be chance; 0 of one run."""
        if self.number < 2:
            return np.zeros(np.shape(self._off)[:2])
        mean = self._off / self.number
        variance = np.maximum(self._square / self.number - mean**2, 0) / (self.number - 1)
        return np.asarray(_ERRORS * np.sqrt(variance.sum(axis=-1)))

    @property
    def chance_of_own(self) -> float:
        """By how much more the mean over the shards' own may be off by chance."""
        return float(np.sqrt(max(1.0, self.number / max(1, self._number_of_own))))

    @property
    def is_off(self) -> bool:
        """Whether a copy is not what one device has, up to rounding and chance."""
        off = np.linalg.norm(self.many[:, None] - self.one, axis=-1)
        return bool(np.any(off > _ROUNDING * np.linalg.norm(self.one, axis=-1) + self.chance))
