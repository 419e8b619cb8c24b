"""Reports: what processes tell each other of themselves; text that anyone may have written."""

import dataclasses
import enum
import re
from typing import Self

from crossshard.distributed.exit_codes import PROCESS_LOST, PROCESS_STALLED

_NUMBER = r"(\d{1,15})"
_WORD = r"([A-Za-z_]\w{0,59})"


class State(enum.StrEnum):
    """Whether a process works, has come to its end, or has failed."""

    RUNNING = "running"
    LEFT = "left"
    FAILED = "failed"
    ENDING = "ending"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a process tells of itself.

    Attributes:
      beat: another number each time.
      calls: how many calls it has entered.
      latest: the latest of them, such as ``"step 7"``.
      state: whether it still works.
      error: the class of the exception that it failed with; ``"nothing"`` without one.
      gone: a process of the same machine that has died; -1 without one.
    """

    beat: int
    calls: int = 0
    latest: str = "nothing"
    state: State = State.RUNNING
    error: str = "nothing"
    gone: int = -1

    def __str__(self) -> str:
        name, _, number = self.latest.partition(" ")
        words = (self.beat, self.calls, name, number or 0, self.state, self.error, self.gone + 1)
        return " ".join(map(str, words))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The report that a text is; ``None`` if it is none."""
        states = "|".join(State)
        found = re.fullmatch(
            rf"{_NUMBER} {_NUMBER} ([a-z][a-z_]{{0,19}}) {_NUMBER} ({states}) {_WORD} {_NUMBER}",
            text[:300],
            re.ASCII,
        )
        if found is None:
            return None
        beat, calls, name, number, state, error, gone = found.groups()
        latest = f"{name} {int(number)}"
        return cls(int(beat), int(calls), latest, State(state), error, int(gone) - 1)


class Kind(enum.StrEnum):
    """What is wrong with a process, or that all have come to their ends."""

    DONE = "done"
    DIED = "died"
    FAILED = "failed"
    LEFT = "left"
    BEHIND = "behind"
    SILENT = "silent"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why all processes leave.

    Attributes:
      kind: what is wrong.
      process: with which of them.
      what: the exception, or the call that it has not entered.
      seconds: for how long.
    """

    kind: Kind
    process: int = 0
    what: str = "nothing"
    seconds: int = 0

    @property
    def code(self) -> int:
        """The exit code of the others."""
        return PROCESS_STALLED if self.kind in (Kind.BEHIND, Kind.SILENT) else PROCESS_LOST

    def sentence(self) -> str:
        """What happened, in a sentence."""
        who = f"process {self.process}"
        match self.kind:
            case Kind.DIED:
                return f"{who} died."
            case Kind.FAILED:
                return f"{who} ended with {self.what}."
            case Kind.LEFT:
                return f"{who} left before {self.what}, which others have entered."
            case Kind.BEHIND:
                return (
                    f"{who} has not entered {self.what} for {self.seconds} seconds, and others "
                    f"wait for it."
                )
            case Kind.SILENT:
                return f"{who} has not been heard of for {self.seconds} seconds."
            case Kind.DONE:
                return "all processes have come to their ends."

    def __str__(self) -> str:
        return f"{self.kind} {self.process} {self.seconds} {self.what}"

    @classmethod
    def parse(cls, text: str, number: int) -> Self | None:
        """The verdict on one of so many processes that a text is; ``None`` if it is none."""
        kinds = "|".join(Kind)
        found = re.fullmatch(
            rf"({kinds}) {_NUMBER} {_NUMBER} ({_WORD}(?: \d{{1,15}})?)", text[:300], re.ASCII
        )
        if found is None or int(found[2]) >= number:
            return None
        return cls(Kind(found[1]), int(found[2]), found[4], int(found[3]))
