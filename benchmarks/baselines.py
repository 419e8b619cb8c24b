"""What takes part in a bench: anything that takes steps and says how long they took."""

import dataclasses
from typing import Protocol

OURS_AUTO = "ours, auto"
OURS_SHARDED = "ours, sharded"
OURS_REPLICATED = "ours, replicated"
HAND_WRITTEN = "hand-written pmean + Optax"


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a candidate did when it was its turn.

    Attributes:
      seconds: for all steps of the turn, each waited for.
      sample: some of its parameters afterwards, the same ones of every candidate.
    """

    seconds: float
    sample: list[float]


class Candidate(Protocol):
    """Idle unless it is its turn."""

    @property
    def name(self) -> str:
        """As it stands in tables."""
        ...

    def run(self, steps: int) -> Turn:
        """Take so many steps on from where it stands."""
        ...
