"""Reports: what processes tell each other of themselves; text that anyone may have written."""

import dataclasses
import enum
import json
import re
from typing import Self

from crossshard._typed import typed
from crossshard.distributed.progress import NO_ROWS
from crossshard.distributed.supervisor.stacks import NOWHERE

# Outside those of sysexits.h.
PROCESS_LOST = 81
"""Exit code of a process that leaves because another one died, failed, or left too early."""
PROCESS_STALLED = 82
"""Exit code of a process that leaves because another one does not move."""

_LONGEST = 2000


class _Told:
    """A dataclass that one process tells another."""

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What a text tells; ``None`` if it is no such text, or would move a terminal's cursor."""
        try:
            found: Self = typed(cls, json.loads(text[:_LONGEST]))
        except (ValueError, RecursionError):
            return None
        texts = (value for value in vars(found).values() if isinstance(value, str))
        return found if all(map(str.isprintable, texts)) else None


class State(enum.StrEnum):
    """Whether a process works, has come to its end, or has failed."""

    RUNNING = "running"
    LEFT = "left"
    FAILED = "failed"
    ENDING = "ending"


@dataclasses.dataclass(frozen=True)
class Report(_Told):
    """What a process tells of itself.

    Attributes:
      beat: another number each time.
      calls: how many calls it has entered.
      latest: the latest of them, such as ``"step 7"``.
      state: whether it still works.
      error: the class of the exception that it failed with; ``"nothing"`` without one.
      gone: a process of the same machine that has died; ``None`` without one.
      place: the line at which its main thread stands.
      rows: what its last step was given.
      rows_since: the first call with these rows.
      before: the calls before the latest, the newest last, as far as they are remembered.
      waits: how often it has waited for the others within the latest.
      inner: where it waits longer than the latest says; empty elsewhere.
    """

    beat: int
    calls: int = 0
    latest: str = "nothing"
    state: State = State.RUNNING
    error: str = "nothing"
    gone: int | None = None
    place: str = NOWHERE
    rows: str = NO_ROWS
    rows_since: int = 0
    before: str = ""
    waits: int = 0
    inner: str = ""

    @property
    def reached(self) -> tuple[int, int]:
        """How far it is, to compare with others."""
        return self.calls, self.waits

    @property
    def others_wait_in(self) -> str:
        """What another process has not entered that is not as far."""
        return self.latest if self.calls else "the first JAX operation"

    @property
    def waits_in(self) -> str:
        """The call that says for how long it may wait."""
        return self.inner or self.latest

    def at(self, call: int) -> str | None:
        """What it has entered as this call; ``None`` if that is long ago, or to come."""
        known = [*filter(None, self.before.split(", ")), self.latest]
        back = self.calls - call
        return known[-1 - back] if 0 <= back < len(known) else None


class Kind(enum.StrEnum):
    """What is wrong with a process, or that all have come to their ends."""

    DONE = "done"
    DIED = "died"
    FAILED = "failed"
    LEFT = "left"
    BEHIND = "behind"
    SILENT = "silent"
    DIFFERS = "differs"
    ELSEWHERE = "elsewhere"
    ALONE = "alone"


@dataclasses.dataclass(frozen=True)
class Verdict(_Told):
    """Why all processes leave.

    Attributes:
      kind: what is wrong.
      process: with which of them.
      what: the exception, or the call that it has not entered, or has with other rows, or that
        another process has entered.
      seconds: for how long.
      place: the line at which it stands.
      rows: what it has entered the call with.
      other: another process.
      expected: what that has entered the call with.
      entered: the call that it has entered last; empty if ``what`` says all.
    """

    kind: Kind
    process: int = 0
    what: str = "nothing"
    seconds: int = 0
    place: str = NOWHERE
    rows: str = NO_ROWS
    other: int = 0
    expected: str = NO_ROWS
    entered: str = ""

    @property
    def code(self) -> int:
        """The exit code of the others."""
        stalled = (Kind.BEHIND, Kind.SILENT, Kind.DIFFERS, Kind.ELSEWHERE, Kind.ALONE)
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
            case Kind.BEHIND if self.entered == self.what:
                return (
                    f"{who} has stood still in {self.what} for {self.seconds} seconds, and others "
                    f"wait for it.{stands}"
                )
            case Kind.BEHIND if self.entered:
                return (
                    f"{who} has entered nothing after {self.entered} for {self.seconds} seconds, "
                    f"and others wait for it in {self.what}.{stands}"
                )
            case Kind.BEHIND:
                return (
                    f"{who} has not entered {self.what} for {self.seconds} seconds, and others "
                    f"wait for it.{stands}"
                )
            case Kind.SILENT:
                last = f" It has entered {self.entered} last." if self.entered else ""
                return f"{who} has not been heard of for {self.seconds} seconds.{last}{stands}"
            case Kind.ELSEWHERE:
                return (
                    f"{who} has entered {self.entered}, and process {self.other} {self.what} in "
                    f"its place. Every process must make the same calls, in the same order.{stands}"
                )
            case Kind.DIFFERS:
                mend = (
                    "Pass as many rows in every process, or weight=, the batch's entry that counts "
                    "them."
                )
                if _dtypes(self.rows) != _dtypes(self.expected):
                    mend = "Pass arrays of the same dtypes in every process."
                return (
                    f"{who} has entered {self.what} with {self.rows}, and process {self.other} "
                    f"with {self.expected}. {mend}"
                )
            case Kind.ALONE:
                return f"nothing was entered for {self.seconds} seconds after {self.what}.{stands}"
            case Kind.DONE:
                return "all processes have come to their ends."


def _dtypes(rows: str) -> str:
    """What a process was given, without the sizes: ``float32,int32`` of ``float32[4,3],int32[4]``.

    >>> _dtypes("float32[4,3],int32[4]")
    'float32,int32'
    """
    return re.sub(r"\[[^\]]*\]", "", rows)
