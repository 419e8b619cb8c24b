"""Candidate: anything that takes steps and returns their time."""

import dataclasses
from typing import Protocol

OURS_AUTO = "ours, auto"
OURS_SHARDED = "ours, sharded"
OURS_PARAMS_SHARDED = "ours, params sharded"
OURS_REPLICATED = "ours, replicated"
HAND_WRITTEN = "hand-written pmean + Optax"
GSPMD = "jit with shardings (FSDP)"
HAND_WRITTEN_SCAN = "hand-written scan, one pmean + Optax"
HAND_WRITTEN_MULTI_STEPS = "hand-written pmean + optax.MultiSteps"


@dataclasses.dataclass(frozen=True)
class Turn:
    """The result of a candidate's turn.

    Attributes:
      seconds: the time of all steps of the turn, blocking after each.
      sample: some parameters after the turn, the same ones for every candidate.
    """

    seconds: float
    sample: list[float]


class Candidate(Protocol):
    """Idle unless it is its turn."""

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    def run(self, steps: int) -> Turn:
        """Take this many steps from the current state."""
        ...
