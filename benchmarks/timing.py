"""The times of one comparison, round by round, and the statistics that are made of them."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spread:
    """Numbers in brief.

    Attributes:
      median: half of them are below.
      low: the first quartile.
      high: the third quartile.
      least: the smallest.
    """

    median: float
    low: float
    high: float
    least: float

    def times(self, factor: float) -> "Spread":
        """The same in another unit."""
        return Spread(*(factor * number for number in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long each candidate took.

    Attributes:
      steps: how many each took in a turn.
      seconds: by name, seconds a step, one number per round.
    """

    steps: int
    seconds: dict[str, list[float]]

    def spread(self, name: str) -> Spread:
        """Of one candidate's seconds a step."""
        return _spread(np.array(self.seconds[name]))

    def ratio(self, name: str, other: str) -> Spread:
        """Of the quotients of two candidates, one per round; below 1 where the first is faster."""
        return _spread(np.array(self.seconds[name]) / np.array(self.seconds[other]))

    def difference(self, name: str, other: str) -> Spread:
        """Of the seconds a step that the first takes more, one number per round."""
        return _spread(np.array(self.seconds[name]) - np.array(self.seconds[other]))

    def ratio_of_minimums(self, name: str, other: str) -> float:
        """The best round of the one over the best of the other."""
        return min(self.seconds[name]) / min(self.seconds[other])

    def difference_of_minimums(self, name: str, other: str) -> float:
        """The seconds a step that the best round of the first takes more than that of the other."""
        return min(self.seconds[name]) - min(self.seconds[other])


def _spread(numbers: np.ndarray) -> Spread:
    low, median, high = np.quantile(numbers, (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high), float(numbers.min()))
