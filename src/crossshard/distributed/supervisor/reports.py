"""Reports: what processes tell each other of themselves; text that anyone may have written."""

import dataclasses
import enum
import re
from typing import Self

from crossshard.distributed.progress import NO_ROWS, ROWS
from crossshard.distributed.supervisor.stacks import NOWHERE, PLACE

# The exit codes of processes that leave because of another one; outside those of sysexits.h. The
# first if that died, failed, or left while it was needed; the second if it does not move.
PROCESS_LOST, PROCESS_STALLED = 81, 82

_NUMBER = r"(\d{1,15})"
_WORD = r"([A-Za-z_]\w{0,59})"
_PLACE = rf"({NOWHERE}|{PLACE})"
_LONGEST = 600


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
      place: the line at which its main thread stands.
      rows: what its last step was given.
      rows_since: the first call with these rows.
    """

    beat: int
    calls: int = 0
    latest: str = "nothing"
    state: State = State.RUNNING
    error: str = "nothing"
    gone: int = -1
    place: str = NOWHERE
    rows: str = NO_ROWS
    rows_since: int = 0

    def __str__(self) -> str:
        name, _, number = self.latest.partition(" ")
        words = (self.beat, self.calls, name, number or 0, self.state, self.error, self.gone + 1)
        return " ".join(map(str, (*words, self.place, self.rows, self.rows_since)))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The report that a text is; ``None`` if it is none."""
        states = "|".join(State)
        found = re.fullmatch(
            rf"{_NUMBER} {_NUMBER} ([a-z][a-z_]{{0,19}}) {_NUMBER} ({states}) {_WORD} {_NUMBER} "
            rf"{_PLACE} ({ROWS}) {_NUMBER}",
            text[:_LONGEST],
            re.ASCII,
        )
        if found is None:
            return None
        beat, calls, name, number, state, error, gone, place, rows, since = found.groups()
        return cls(
            int(beat),
            int(calls),
            f"{name} {int(number)}",
            State(state),
            error,
            int(gone) - 1,
            place,
            rows,
            int(since),
        )


class Kind(enum.StrEnum):
    """What is wrong with a process, or that all have come to their ends."""

    DONE = "done"
    DIED = "died"
    FAILED = "failed"
    LEFT = "left"
    BEHIND = "behind"
    SILENT = "silent"
    DIFFERS = "differs"
    ALONE = "alone"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why all processes leave.

    Attributes:
      kind: what is wrong.
      process: with which of them.
      what: the exception, or the call that it has not entered, or has with other rows.
      seconds: for how long.
      place: the line at which it stands.
      rows: what it has entered the call with.
      other: another process.
      expected: what that has entered the call with.
    """

    kind: Kind
    process: int = 0
    what: str = "nothing"
    seconds: int = 0
    place: str = NOWHERE
    rows: str = NO_ROWS
    other: int = 0
    expected: str = NO_ROWS

    @property
    def code(self) -> int:
        """The exit code of the others."""
        stalled = (Kind.BEHIND, Kind.SILENT, Kind.DIFFERS, Kind.ALONE)
        return PROCESS_STALLED if self.kind in stalled else PROCESS_LOST

    def sentence(self) -> str:
        """What happened, in a sentence, and where the process stands, in another."""
        who = f"process {self.process}"
        stands = "" if self.place == NOWHERE else f" It stands at {self.place}."
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
                    f"wait for it.{stands}"
                )
            case Kind.SILENT:
                return f"{who} has not been heard of for {self.seconds} seconds.{stands}"
            case Kind.DIFFERS:
                return (
                    f"{who} has entered {self.what} with {self.rows}, and process {self.other} "
                    f"with {self.expected}. Pass as many rows in every process, or weight=, the "
                    f"batch's entry that counts them."
                )
            case Kind.ALONE:
                return f"nothing was entered for {self.seconds} seconds after {self.what}.{stands}"
            case Kind.DONE:
                return "all processes have come to their ends."

    def __str__(self) -> str:
        said = f"{self.kind} {self.process} {self.seconds} {self.what}"
        return f"{said} at {self.place} with {self.rows} not {self.other} {self.expected}"

    @classmethod
    def parse(cls, text: str, number: int) -> Self | None:
        """The verdict on one of so many processes that a text is; ``None`` if it is none."""
        kinds = "|".join(Kind)
        found = re.fullmatch(
            rf"({kinds}) {_NUMBER} {_NUMBER} ([A-Za-z_]\w{{0,59}}(?: \d{{1,15}})?) "
            rf"at {_PLACE} with ({ROWS}) not {_NUMBER} ({ROWS})",
            text[:_LONGEST],
            re.ASCII,
        )
        if found is None:
            return None
        kind, process, seconds, what, place, rows, other, expected = found.groups()
        if max(int(process), int(other)) >= number:
            return None
        return cls(Kind(kind), int(process), what, int(seconds), place, rows, int(other), expected)
