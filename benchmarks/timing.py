"""The times of one comparison, by round, and their statistics."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spread:
    """Summary statistics.

    Attributes:
      median: the median.
      low: the first quartile.
      high: the third quartile.
      least: the smallest.
    """

    median: float
    low: float
    high: float
    least: float

    def times(self, factor: float) -> "Spread":
        """The same statistics in another unit."""
        return Spread(*(factor * number for number in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of the candidates.

    Attributes:
      steps: the steps of each turn.
      seconds: by name, the seconds per step of every round.
    """

    steps: int
    seconds: dict[str, list[float]]

    def spread(self, name: str) -> Spread:
        """Statistics of one candidate's seconds per step."""
        return _spread(np.array(self.seconds[name]))

    def ratio(self, name: str, other: str) -> Spread:
        """Statistics of the ratio of two candidates, by round; below 1 if the first is faster."""
        return _spread(np.array(self.seconds[name]) / np.array(self.seconds[other]))

    def difference(self, name: str, other: str) -> Spread:
        """Statistics of the first's seconds per step minus the other's, by round."""
        return _spread(np.array(self.seconds[name]) - np.array(self.seconds[other]))

    def ratio_of_minimums(self, name: str, other: str) -> float:
        """The minimum of the first over the minimum of the other."""
        return min(self.seconds[name]) / min(self.seconds[other])

    def difference_of_minimums(self, name: str, other: str) -> float:
        """The minimum of the first minus the minimum of the other."""
        return min(self.seconds[name]) - min(self.seconds[other])


def _spread(numbers: np.ndarray) -> Spread:
    low, median, high = np.quantile(numbers, (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high), float(numbers.min()))
