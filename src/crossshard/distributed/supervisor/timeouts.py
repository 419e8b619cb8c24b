"""Timeouts: for how long a process may stand still, by what the others wait for."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from crossshard import _check
from crossshard.distributed.progress import NAME
from crossshard.errors import ArgumentError

_START, _STEP, _ALONE = "start", "step", "alone"
# Calls before the first step.
_EARLY = ("nothing", "init", "checkpoints", "restore")
# For what processes may wait longer than in a step, unless the user names it. XLA finds a program
# in the cache of one machine, and compiles it on another. The first one looks for half a minute
# whether a writer on another machine is alive. Who waits for a checkpoint to be written waits for
# what the others write, and they may do something else meanwhile.
_LONGER = {"compile": 600.0, "lock": 60.0, "wait": math.inf}


def is_before_steps(call: str) -> bool:
    """Whether a process that has entered this call last prepares its steps."""
    return call.partition(" ")[0] in _EARLY


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Seconds of each kind of call.

    Attributes:
      step: those of a step, and of whatever is not in the others.
      others: those of other calls, by their names; of ``"start"``, which is all until the first
        step is entered; and of ``"alone"``, for a process that nobody waits for.
    """

    step: float
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of(self, call: str) -> float:
        """For how long others may wait in a call, such as ``"step 7"``, for one to enter it."""
        name = call.partition(" ")[0]
        return self.others.get(name, max(self.silence(call), _LONGER.get(name, 0)))

    def silence(self, call: str) -> float:
        """For how long nothing may be heard of a process in a call."""
        is_early = is_before_steps(call) or call == "step 1"
        default = self.others.get(_START, self.step) if is_early else self.step
        return self.others.get(call.partition(" ")[0], default)

    @property
    def alone(self) -> float | None:
        """Those of a process that nobody waits for; ``None`` if it is not watched."""
        return self.others.get(_ALONE)

    @property
    def longest(self) -> float:
        """The longest of them."""
        return max((self.step, *self.others.values()))

    @classmethod
    def read(cls, given: Any, default: float) -> "Timeouts":
        """From a number, or from numbers by name.

        Raises:
          ArgumentError: a number is below one second, or a name is not that of a call.
          ArgumentTypeError: it is neither.
        """
        if not isinstance(given, Mapping):
            check_seconds("stall_timeout", given)
            return cls(given)
        for name, seconds in given.items():
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ArgumentError(
                    f"stall_timeout names what is entered: 'start', 'step', 'evaluate', the name "
                    f"that you pass to entering(), or 'alone'; got {name!r:.60}."
                )
            check_seconds(f"stall_timeout[{name!r}]", seconds)
        others = {name: seconds for name, seconds in given.items() if name != _STEP}
        return cls(given.get(_STEP, default), others)


def check_seconds(name: str, seconds: object) -> None:
    """Raise unless it is a number of at least one second.

    Raises:
      ArgumentError: it is less.
      ArgumentTypeError: it is not a number.
    """
    if not _check.number(name, seconds) >= 1:
        raise ArgumentError(f"{name} must be at least one second; got {seconds}.")
