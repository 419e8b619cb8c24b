"""Results of a benchmark, one for each problem and number of shards."""

import dataclasses

from benchmarks.timing import Timing


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
      problem: a short name of the problem.
      parameters: the number of trainable parameters.
      shards: the number of shards; ``None`` without steps, or if the problem tells it.
      timing: the times of every candidate.
      differences: the largest difference of each candidate's parameters from the first one's
        after the same few steps.
      floor_bytes: the bytes that a step must move at least; ``None`` if not computed.
      bandwidth: the measured bandwidth in bytes/s; ``None`` if not measured.
      sent: by candidate, the bytes that one shard sends for an update; ``None`` if not read.
      least_sent: the bytes that one shard must send at least; ``None`` if not read.
      held: by candidate, the bytes of state besides the parameters on one shard; ``None`` if not
        counted.
      of_parameters: by candidate, the bytes of parameters on one shard; ``None`` if not counted.
      compiling: by candidate, the seconds to compile a step; ``None`` if not measured.
    """

    problem: str
    parameters: int
    shards: int | None
    timing: Timing
    differences: dict[str, float]
    floor_bytes: int | None = None
    bandwidth: float | None = None
    sent: dict[str, float] | None = None
    least_sent: float | None = None
    held: dict[str, int] | None = None
    of_parameters: dict[str, int] | None = None
    compiling: dict[str, float] | None = None

    @property
    def floor_seconds(self) -> float | None:
        """The lower bound of a step's time."""
        if self.floor_bytes is None or self.bandwidth is None:
            return None
        return self.floor_bytes / self.bandwidth

    def title(self) -> str:
        """The problem and the number of shards."""
        if self.shards is None:
            return self.problem
        return f"{self.problem}, {self.shards} shard{'s' * (self.shards > 1)}"
