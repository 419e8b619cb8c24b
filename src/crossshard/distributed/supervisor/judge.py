"""Judge: what processes tell of themselves, and what process 0 makes of it; no clock, no network.

Texts that others have written may be anything.
"""

import collections
import dataclasses
import enum
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Self

from crossshard import _check
from crossshard._typed import typed
from crossshard.distributed.progress import NAME, NO_ROWS
from crossshard.errors import ArgumentError

# Outside those of sysexits.h.
PROCESS_LOST = 81
"""Exit code of a process that leaves because another one died, failed, or left too early."""
PROCESS_STALLED = 82
"""Exit code of a process that leaves because another one does not move."""

# Where a process stands of which that is not known.
NOWHERE = "nowhere"
_LONGEST_TEXT = 2000
# After a process has failed or left: long enough to see whether it did because another one died, or
# whether the others do so too.
FAILURE_SECONDS = 2.5
# Processes that all see that they have other rows than the others raise sooner.
ROWS_SECONDS = 5.0
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


class _Told:
    """A dataclass that one process tells another."""

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What a text tells; ``None`` if it is no such text, or would move a terminal's cursor."""
        try:
            found: Self = typed(cls, json.loads(text[:_LONGEST_TEXT]))
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


@dataclasses.dataclass
class _Heard:
    """The latest report of a process, and since when it has not changed."""

    report: Report
    beat_since: float
    reached_since: float
    failed_since: float | None = None
    behind_since: float | None = None


class Judge:
    """Finds the process that the others wait for in vain.

    Args:
      number: how many processes there are.
      timeouts: for how many seconds they may wait.
      now: the time, in seconds.
    """

    def __init__(self, number: int, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        # The call that processes have entered with other rows, and since when that is known.
        self._differing: tuple[int, float] | None = None
        # The same of a call in whose place some have entered another one.
        self._apart: tuple[int, float] | None = None
        self._heard = {process: _Heard(Report(0), now, now) for process in range(number)}

    def hear(self, reports: Mapping[int, Report], now: float) -> Verdict | None:
        """Take the reports that have come, and say what is wrong; ``None`` if nothing is."""
        for process, report in reports.items():
            self._note(process, report, now)
        return (
            self._of_failures(now)
            or self._of_rows(now)
            or self._of_calls(now)
            or self._of_silence(now)
        )

    def _note(self, process: int, report: Report, now: float) -> None:
        heard = self._heard[process]
        if report.beat != heard.report.beat:
            heard.beat_since = now
        if report.reached != heard.report.reached:
            heard.reached_since = now
        if report.state is State.FAILED and heard.failed_since is None:
            heard.failed_since = now
        heard.report = report

    def _of_failures(self, now: float) -> Verdict | None:
        gone = {heard.report.gone for heard in self._heard.values()}
        for process, heard in self._heard.items():
            if process in gone and heard.report.state is State.RUNNING:
                return Verdict(Kind.DIED, process)
        failed = {process: h.failed_since for process, h in self._heard.items() if h.failed_since}
        if not failed:
            return None
        first = min(failed, key=lambda process: failed[process])
        if now - failed[first] < FAILURE_SECONDS:
            return None
        # Its runtime may have failed since another process, of another machine, died.
        for process, heard in self._heard.items():
            if heard.report.state is State.RUNNING and now - heard.beat_since >= FAILURE_SECONDS:
                return Verdict(Kind.DIED, process)
        return Verdict(Kind.FAILED, first, self._heard[first].report.error)

    def _of_rows(self, now: float) -> Verdict | None:
        """A call that some have entered with other rows: there they wait for each other."""
        reports = {process: heard.report for process, heard in self._heard.items()}
        call = min(report.calls for report in reports.values())
        # What has changed since then says nothing of that call.
        known = {
            process: report
            for process, report in reports.items()
            if report.rows != NO_ROWS and report.rows_since <= call
        }
        if len({report.rows for report in known.values()}) < 2:
            self._differing = None
            return None
        if self._differing is None or self._differing[0] != call:
            self._differing = (call, now)
        if now - self._differing[1] < ROWS_SECONDS:
            return None
        # Those that have had their rows for longer are not the odd ones.
        order = sorted(known, key=lambda process: known[process].rows_since)
        odd, usual = _odd({process: known[process].rows for process in order})
        of_call = next(each for each in reports.values() if each.calls == call)
        return Verdict(
            Kind.DIFFERS,
            odd,
            of_call.latest,
            rows=known[odd].rows,
            other=usual,
            expected=known[usual].rows,
        )

    def _of_calls(self, now: float) -> Verdict | None:
        reports = {process: heard.report for process, heard in self._heard.items()}
        if all(report.state is State.LEFT for report in reports.values()):
            return Verdict(Kind.DONE)
        if self._differing is not None:
            # They wait for each other, and the rows will say why.
            return None
        call = min(report.calls for report in reports.values())
        entered = {process: label for process, r in reports.items() if (label := r.at(call))}
        if len(set(entered.values())) > 1:
            return self._of_other_ways(call, entered, now)
        self._apart = None
        ahead = max(reports.values(), key=lambda report: report.reached)
        what = ahead.others_wait_in
        for process, heard in self._heard.items():
            own = heard.report
            if own.reached >= ahead.reached:
                heard.behind_since = None
                continue
            if heard.behind_since is None:
                heard.behind_since = now
            if own.state is State.LEFT and now - heard.behind_since >= FAILURE_SECONDS:
                return Verdict(Kind.LEFT, process, what)
            waited = now - max(heard.behind_since, heard.reached_since)
            if own.state is State.RUNNING and waited >= self._timeouts.of(ahead.waits_in):
                if now - heard.beat_since >= FAILURE_SECONDS:
                    return self._silent(process, now)
                says_all = own.calls == ahead.calls - 1 or ahead.calls == 0
                last = "" if says_all else own.latest
                return Verdict(Kind.BEHIND, process, what, int(waited), own.place, entered=last)
        return None

    def _of_other_ways(self, call: int, entered: dict[int, str], now: float) -> Verdict | None:
        """A call in whose place some have entered another one: there they wait for each other."""
        if self._apart is None or self._apart[0] != call:
            self._apart = (call, now)
        odd, usual = _odd(entered)
        waited = now - self._apart[1]
        for one, other in ((odd, usual), (usual, odd)):
            left = [self._heard[each].report.state is State.LEFT for each in (one, other)]
            if left == [True, False] and waited >= FAILURE_SECONDS:
                return Verdict(Kind.LEFT, one, entered[other])
        if waited < min(map(self._timeouts.of, entered.values())):
            return None
        place = self._heard[odd].report.place
        return Verdict(
            Kind.ELSEWHERE, odd, entered[usual], place=place, other=usual, entered=entered[odd]
        )

    def _of_silence(self, now: float) -> Verdict | None:
        for process, heard in self._heard.items():
            silent = now - heard.beat_since
            seconds = self._timeouts.silence(heard.report.latest)
            if heard.report.state is State.RUNNING and silent >= seconds:
                return self._silent(process, now)
        return None

    def _silent(self, process: int, now: float) -> Verdict:
        heard = self._heard[process]
        entered = "" if heard.report.calls == 0 else heard.report.latest
        seconds, place = int(now - heard.beat_since), heard.report.place
        return Verdict(Kind.SILENT, process, seconds=seconds, place=place, entered=entered)


def _odd(words: Mapping[int, str]) -> tuple[int, int]:
    """A process whose word most others do not have, and the first of those that have another."""
    many = collections.Counter(words.values())
    order = sorted(words, key=lambda process: -many[words[process]])
    return next(each for each in order if words[each] != words[order[0]]), order[0]
