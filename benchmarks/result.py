"""What a bench came to, one result for each problem and number of shards."""

import dataclasses

from benchmarks.timing import Timing


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
      problem: what was solved, in a few words.
      parameters: how many numbers are learnt.
      shards: how many shards stepped together; ``None`` where none step.
      timing: of every candidate.
      differences: by how much a parameter of each candidate differs at most from the first
        one's after the same few steps.
      floor_bytes: that must move in a step at least; ``None`` where that is not asked.
      bandwidth: bytes a second, measured beside; ``None`` likewise.
    """

    problem: str
    parameters: int
    shards: int | None
    timing: Timing
    differences: dict[str, float]
    floor_bytes: int | None = None
    bandwidth: float | None = None

    @property
    def floor_seconds(self) -> float | None:
        """How long the bytes that must move take at least."""
        if self.floor_bytes is None or self.bandwidth is None:
            return None
        return self.floor_bytes / self.bandwidth

    def title(self) -> str:
        """What was solved on how many shards."""
        if self.shards is None:
            return self.problem
        return f"{self.problem}, {self.shards} shard{'s' * (self.shards > 1)}"
