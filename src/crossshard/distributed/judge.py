"""Judge: what processes tell of themselves, and which one the others wait for in vain.

It reads no clock and no network. A text from another process may hold anything.
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
from crossshard._check import typed
from crossshard.errors import ArgumentError

# Outside those of sysexits.h.
PROCESS_LOST = 81
"""Exit code of a process that leaves because another one died, failed, or left too early."""
PROCESS_STALLED = 82
"""Exit code of a process that leaves because another one does not move."""

# The name of a call.
NAME = re.compile(r"[a-z][a-z_]{0,19}")
_LONGEST_TEXT = 1 << 14
# After a process has failed or left: long enough to see whether it did because another one died, or
# whether the others do so too.
FAILURE_SECONDS = 2.5
# Processes that all see that they have other rows than the others raise sooner.
ROWS_SECONDS = 5.0
# Between what was put into a state before a call, and the rows of the call.
AND = " and "
SAME_ROWS = (
    "Pass as many rows, of the same dtypes, in every process, or weight=, the batch's entry that "
    "counts them"
)
_SAME_STATE = "Put the same arrays into the state, or the variables, in every process"
# Calls before the first step.
EARLY = ("nothing", "init", "checkpoints", "steps", "scores", "restore")
# Calls in which processes may wait longer than in a step, unless the user names them. XLA finds a
# program in the cache of one machine, and compiles it on another. Process 0 looks for half a minute
# whether a writer on another machine is alive. A process that waits for a checkpoint waits for what
# the others write, and they may do something else meanwhile.
_LONGER = {"compile": 600.0, "lock": 60.0, "wait": math.inf}


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """For how many seconds others may wait in each kind of call."""

    # In a step, and in every call that is not in ``others``.
    step: float
    # By the name of a call; "start" is for all calls until the first step is entered, and "alone"
    # for a process that nobody waits for.
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of(self, call: str) -> float:
        """Return how long others may wait in a call, such as ``"step 7"``, for one to enter it."""
        name = call.partition(" ")[0]
        return self.others.get(name, max(self.silence(call), _LONGER.get(name, 0)))

    def silence(self, call: str) -> float:
        """Return for how long a process in a call may tell nothing."""
        name = call.partition(" ")[0]
        is_early = name in EARLY or call == "step 1"
        default = self.others.get("start", self.step) if is_early else self.step
        return self.others.get(name, default)

    @classmethod
    def read(cls, given: Any, default: float) -> "Timeouts":
        """Read a number, or numbers by name; an error names what is neither."""
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
        others = {name: seconds for name, seconds in given.items() if name != "step"}
        return cls(given.get("step", default), others)


def check_seconds(name: str, seconds: object) -> None:
    """Raise unless it is a number of at least one second."""
    if not _check.number(name, seconds) >= 1:
        raise ArgumentError(f"{name} must be at least one second; got {seconds}.")


class _Told:
    """A dataclass that one process tells another."""

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a text; ``None`` if it tells no such thing, or would move a terminal's cursor."""
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


@dataclasses.dataclass(frozen=True)
class Given:
    """Calls of a process, one after the other, which were given the same."""

    first: int  # of these calls
    last: int
    call: str  # the name of the first
    what: str  # rows, and what was put into the state
    mark: str  # a hash of what was given in all calls up to the first

    @property
    def level(self) -> int:
        """The highest power of two of which one of the calls is a multiple."""
        return ((self.first - 1) ^ self.last).bit_length()


@dataclasses.dataclass(frozen=True)
class Report(_Told):
    """What a process tells of itself."""

    beat: int  # another number each time
    calls: int = 0  # how many it has entered
    latest: str = "nothing"  # of them, such as "step 7"
    state: State = State.RUNNING
    error: str = ""  # the class of the exception that it failed with
    gone: int | None = None  # a process of the same machine that has died
    place: str = ""  # the line at which its main thread stands, if that is known
    rows: str = ""  # what its last step was given
    rows_since: int = 0  # the first call with these rows
    before: str = ""  # the calls before the latest, the newest last, as far as remembered
    waits: int = 0  # how often it has waited for the others within the latest
    inner: str = ""  # where it waits longer than the latest says
    given: tuple[Given, ...] = ()  # what calls before ``rows_since`` were given, as far as kept
    rows_call: str = ""  # the first call with these rows, by its name
    mark: str = ""  # a hash of what was given in all calls up to it

    @property
    def known(self) -> tuple[Given, ...]:
        """What its calls were given, the newest last, as far as it is known."""
        if not self.rows_since:
            return ()
        now = Given(self.rows_since, self.calls, self.rows_call, self.rows, self.mark)
        return *self.given, now

    def mark_before(self) -> str:
        """Return the hash of what all calls before the latest were given."""
        known = [each.mark for each in self.known if each.first < self.calls]
        return known[-1] if known else ""

    @property
    def reached(self) -> tuple[int, int]:
        """How far it is, to compare with others."""
        return self.calls, self.waits

    @property
    def trail(self) -> list[str]:
        """The calls that it has entered, the newest last, as far as remembered."""
        return [*filter(None, self.before.split(", ")), self.latest]

    def at(self, call: int) -> str | None:
        """Return the name of its call of this number; ``None`` if forgotten, or not yet entered."""
        back = self.calls - call
        return self.trail[-1 - back] if 0 <= back < len(self.trail) else None


class Kind(enum.StrEnum):
    """What is wrong with a process, or that all have come to their ends."""

    DONE = "done"
    DIED = "died"
    FAILED = "failed"
    LEFT = "left"
    # It stands still, or has gone another way, but says so.
    STALLED = "stalled"
    SILENT = "silent"


@dataclasses.dataclass(frozen=True)
class Verdict(_Told):
    """Why all processes leave."""

    kind: Kind
    process: int = 0  # with which something is wrong
    sentence: str = ""  # what happened, and where that process stands

    @property
    def code(self) -> int:
        """The exit code of the others."""
        stalled = self.kind in (Kind.STALLED, Kind.SILENT)
        return PROCESS_STALLED if stalled else PROCESS_LOST

    @classmethod
    def of(cls, kind: Kind, process: int, how: str, place: str = "") -> "Verdict":
        """Return the verdict on a process that did something."""
        where = f" It stands at {place}." if place else ""
        return cls(kind, process, f"process {process} {how}.{where}")


def left_before(call: str, process: int) -> Verdict:
    """Return the verdict on a process that has come to its end before a call of the others."""
    return Verdict.of(Kind.LEFT, process, f"left before {call}, which others have entered")


def unheard(process: int, seconds: float, last: Report | None = None) -> Verdict:
    """Return the verdict on a process that has told nothing since its last report."""
    also = f". It has entered {last.latest} last" if last and last.calls else ""
    how = f"has not been heard of for {int(seconds)} seconds{also}"
    return Verdict.of(Kind.SILENT, process, how, last.place if last else "")


class Judge:
    """Finds the process that the others wait for in vain, from reports and the time in seconds."""

    def __init__(self, number: int, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._reports = {process: Report(0) for process in range(number)}
        # What is so at this hearing, and since when it has been so at each.
        self._since: dict[tuple[Any, ...], float] = {}
        self.hear({}, now)

    def hear(self, reports: Mapping[int, Report | None], now: float) -> Verdict | None:
        """Take the reports that have come, and say what is wrong; ``None`` if nothing is."""
        self._now, self._before, self._since = now, self._since, {}
        self._reports |= {process: each for process, each in reports.items() if each is not None}
        each = self._reports.items()
        self._silent = {process: self._seconds("beat", process, r.beat) for process, r in each}
        self._still = {process: self._seconds("reached", process, r.reached) for process, r in each}
        return self._of_failures() or self._of_calls() or self._of_silence()

    def _seconds(self, *what: Any) -> float:
        """Return for how many seconds this has been so at each hearing."""
        self._since[what] = self._before.get(what, self._now)
        return self._now - self._since[what]

    def _of_failures(self) -> Verdict | None:
        reports = self._reports
        gone = {report.gone for report in reports.values()}
        states = {process: report.state for process, report in reports.items()}
        failed = {
            process: self._seconds("failed", process)
            for process in states
            if states[process] is State.FAILED
        }
        has_failed = max(failed.values(), default=0) >= FAILURE_SECONDS
        for process in sorted(states, key=lambda process: process not in gone):
            # Or a runtime may have failed since another process, of another machine, died.
            is_dead = process in gone or (has_failed and self._silent[process] >= FAILURE_SECONDS)
            if is_dead and states[process] is State.RUNNING:
                return Verdict.of(Kind.DIED, process, "died")
        if not has_failed:
            return None
        first = max(failed, key=lambda process: failed[process])
        return Verdict.of(Kind.FAILED, first, f"ended with {reports[first].error}")

    def _of_calls(self) -> Verdict | None:
        reports = self._reports
        are_over = all(report.state is State.LEFT for report in reports.values())
        differ = self._of_earlier(min(r.calls for r in reports.values()) + are_over)
        if are_over or differ:
            return differ or Verdict(Kind.DONE)
        ahead = max(reports.values(), key=lambda report: report.reached)
        behind = {
            process: self._seconds("behind", process)
            for process, report in reports.items()
            if report.reached < ahead.reached
        }
        # Where some have entered a call with other rows, or another one in its place, they wait for
        # each other. What has changed since then says nothing of that call.
        call = min(report.calls for report in reports.values())
        rows = self._given_in(call)
        entered = {process: label for process, r in reports.items() if (label := r.at(call))}
        if len(set(rows.values())) > 1:
            return self._of_rows(call, rows)
        if len(set(entered.values())) > 1:
            return self._of_other_calls(call, entered)
        what = ahead.latest if ahead.calls else "the first JAX operation"
        timeout = self._timeouts.of(ahead.inner or ahead.latest)
        for process, seconds in behind.items():
            own = reports[process]
            if own.state is State.LEFT and seconds >= FAILURE_SECONDS:
                return left_before(what, process)
            waited = min(seconds, self._still[process])
            if own.state is not State.RUNNING or waited < timeout:
                continue
            if self._silent[process] >= FAILURE_SECONDS:
                return unheard(process, self._silent[process], own)
            wait = f"for {int(waited)} seconds, and others wait for it"
            if own.calls == ahead.calls - 1 or not ahead.calls:
                how = f"has not entered {what} {wait}"
            elif own.latest == what:
                how = f"has stood still in {what} {wait}"
            else:
                how = f"has entered nothing after {own.latest} {wait} in {what}"
            return Verdict.of(Kind.STALLED, process, how, own.place)
        return None

    def _of_rows(self, call: int, rows: dict[int, str]) -> Verdict | None:
        if self._seconds("rows", call) < ROWS_SECONDS:
            return None
        what = next(each.latest for each in self._reports.values() if each.calls == call)
        return _of_given(what, rows)

    def _given_in(self, call: int) -> dict[int, str]:
        """Return what each process was given in a call, as far as it is known."""
        found = {
            process: each
            for process, report in self._reports.items()
            for each in report.known
            if each.first <= call <= each.last
        }
        # Those that have had their rows for longer are not the odd ones.
        order = sorted(found, key=lambda process: found[process].first)
        return {process: found[process].what for process in order}

    def _of_earlier(self, now: int) -> Verdict | None:
        """Compare what processes were given in calls before this one, which have ended."""
        first, *others = self._reports.items()
        for process, report in others:
            if report.mark == first[1].mark:
                continue
            pairs = [
                (own, other)
                for own in first[1].known
                for other in report.known
                if max(own.first, other.first) < min(now, own.last + 1, other.last + 1)
                and own.mark != other.mark
            ]
            # If it was not the same rows, what was given before was not.
            for own, other in pairs:
                if own.what != other.what:
                    later = max(own, other, key=lambda each: each.first)
                    return _of_given(later.call, self._given_in(later.first))
            if pairs:
                later = max(pairs[0], key=lambda each: each.first)
                how = f"was given something else than process {first[0]} before {later.call}"
                return Verdict.of(Kind.STALLED, process, f"{how}. {SAME_ROWS}")
        return None

    def _of_other_calls(self, call: int, entered: dict[int, str]) -> Verdict | None:
        waited = self._seconds("calls", call)
        odd, usual = _odd(entered)
        left = [each for each in (odd, usual) if self._reports[each].state is State.LEFT]
        if len(left) == 1 and waited >= FAILURE_SECONDS:
            return left_before(entered[usual if left == [odd] else odd], left[0])
        if waited < min(map(self._timeouts.of, entered.values())):
            return None
        how = (
            f"has entered {entered[odd]}, and process {usual} {entered[usual]} in its place. Every "
            f"process must make the same calls, in the same order"
        )
        return Verdict.of(Kind.STALLED, odd, how, self._reports[odd].place)

    def _of_silence(self) -> Verdict | None:
        for process, report in self._reports.items():
            may_be = self._timeouts.silence(report.latest)
            if report.state is State.RUNNING and self._silent[process] >= may_be:
                return unheard(process, self._silent[process], report)
        return None


def _of_given(call: str, words: dict[int, str]) -> Verdict:
    """Return the verdict on the process that was given something else in a call than others."""
    odd, usual = _odd(words)
    shown = words[odd] or "no rows", words[usual] or "no rows"
    how = f"has entered {call} with {shown[0]}, and process {usual} with {shown[1]}"
    rows = {word.rpartition(AND)[2] for word in (words[odd], words[usual])}
    return Verdict.of(Kind.STALLED, odd, f"{how}. {SAME_ROWS if len(rows) > 1 else _SAME_STATE}")


def _odd(words: Mapping[int, str]) -> tuple[int, int]:
    """Return a process whose word most others do not have, and the first that has the usual one."""
    many = collections.Counter(words.values())
    order = sorted(words, key=lambda process: -many[words[process]])
    return next(each for each in order if words[each] != words[order[0]]), order[0]
