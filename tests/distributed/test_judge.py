"""What process 0 makes of reports, at times that the test makes up."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from crossshard.distributed import PROCESS_LOST, PROCESS_STALLED
from crossshard.distributed.judge import (
    FAILURE_SECONDS,
    ROWS_SECONDS,
    Given,
    Judge,
    Kind,
    Report,
    State,
    Timeouts,
    Verdict,
)
from crossshard.distributed.watch import Progress

TIMEOUT = 10.0
DIED = Verdict(Kind.DIED, 1, "process 1 died.")


def has_left(process: int, call: str) -> Verdict:
    sentence = f"process {process} left before {call}, which others have entered."
    return Verdict(Kind.LEFT, process, sentence)


class Job:
    """Three processes that report every second, each what it last said."""

    def __init__(self) -> None:
        self.judge = Judge(3, Timeouts(TIMEOUT), 0.0)
        self.now = 0.0
        self.says = [dict[str, object]() for _ in range(3)]
        self.silent: set[int] = set()
        self.told: dict[int, Report] = {}

    def run(self, seconds: float) -> Verdict | None:
        """The first verdict in so many seconds."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            beat = int(2 * self.now)
            told = {k: Report(beat, **says) for k, says in enumerate(self.says)}
            # What a process wrote down last stays there.
            self.told |= {k: report for k, report in told.items() if k not in self.silent}
            verdict = self.judge.hear(self.told, self.now)
            if verdict is not None:
                return verdict
        return None


@pytest.fixture
def job() -> Job:
    return Job()


def at(latest: str, calls: int = 8, **more: object) -> dict[str, object]:
    """What a process says that has entered so many calls."""
    return {"calls": calls, "latest": latest, **more}


def named(process: int, kind: Kind, how: str) -> Verdict:
    return Verdict(kind, process, f"process {process} {how}")


LEFT, FAILED = {"state": State.LEFT}, {"state": State.FAILED, "error": "JaxRuntimeError"}
LATE = "for 10 seconds, and others wait for it"
SEVEN, ENDS = at("step 7", before="nothing, init 1, step 6"), {"before": "step 6, finish 1"}
EVALUATES = at("save 1", 9, before="step 6, evaluate 1", place="a.py:3")


def gave(*parts: tuple[int, int, str, str]) -> dict[str, object]:
    """What a process says that was given this: the first call, the last, what, and the mark."""
    *before, now = (Given(first, last, f"step {first}", *rest) for first, last, *rest in parts)
    said = {"rows": now.what, "rows_since": now.first, "rows_call": now.call, "mark": now.mark}
    return at(f"step {now.last}", now.last, given=tuple(before), **said)


USUAL, OTHERS = ({"rows": f"float32[{n},3]", "rows_since": since} for n, since in ((8, 2), (4, 7)))
FOUND_ROWS = (
    "has entered step 6 with float32[4,3], and process {} with float32[8,3]. Pass as many rows, of "
    "the same dtypes, in every process, or weight=, the batch's entry that counts them."
)
# What three processes say one after the other, for how many seconds nothing is found wrong then,
# and which of them are silent; and what is found soon after the last of it.
STORIES: dict[str, tuple[list[tuple[Any, ...]], Verdict | None]] = {
    "equally far, they may take as long as they want": ([([{}] * 3, 1000)], None),
    # Not from its own last step on: the others have not waited before.
    "behind, once the others have waited": (
        [([at("step 7")] * 3, 50), ([at("step 8", 9), at("step 8", 9), at("step 7")], TIMEOUT - 1)],
        named(2, Kind.STALLED, f"has not entered step 8 {LATE}."),
    ),
    "silent, whatever it has entered": (
        [([{}] * 3, 3), ([{}] * 3, TIMEOUT - 1, {1})],
        named(1, Kind.SILENT, "has not been heard of for 10 seconds."),
    ),
    "a death that its machine tells": ([([{}, {}, {"gone": 1}], 0)], DIED),
    "who has left may be gone": ([([{}, LEFT, {"gone": 1}], 1000)], None),
    "the first that tells of a failure": (
        [
            ([{}, {}, FAILED | {"error": "ValueError"}], FAILURE_SECONDS / 2),
            ([FAILED, {}, FAILED | {"error": "ValueError"}], 0),
        ],
        named(2, Kind.FAILED, "ended with ValueError."),
    ),
    "failures because another one has died": (
        [([{}] * 3, 3), ([FAILED, {}, FAILED], 0, {1})],
        DIED,
    ),
    # The other may be about to leave, too.
    "who has left, once another one needs it": (
        [
            ([at("step 2", 3), at("step 2", 3) | LEFT, at("step 2", 3)], 1000),
            ([at("step 3", 4), at("step 2", 3) | LEFT, at("step 2", 3)], FAILURE_SECONDS - 1),
        ],
        has_left(1, "step 3"),
    ),
    "who has left by another way, though it has entered as much": (
        [([SEVEN, SEVEN | at("finish 1") | LEFT, SEVEN], FAILURE_SECONDS - 1)],
        has_left(1, "step 7"),
    ),
    "who has left by another way, and has entered more": (
        [([SEVEN, SEVEN, at("save 4", 9) | ENDS | LEFT], FAILURE_SECONDS - 1)],
        has_left(2, "step 7"),
    ),
    "who enters something else": (
        [([EVALUATES, SEVEN, SEVEN], TIMEOUT - 1)],
        named(
            0,
            Kind.STALLED,
            "has entered evaluate 1, and process 1 step 7 in its place. Every process must make "
            "the same calls, in the same order. It stands at a.py:3.",
        ),
    ),
    "who stands still in what all have entered": (
        [([at("save 2", waits=0), at("save 2", waits=1), at("save 2", waits=1)], TIMEOUT - 1)],
        named(0, Kind.STALLED, f"has stood still in save 2 {LATE}."),
    ),
    "who is far behind": (
        [([at("step 8", 9)] * 3, 2), ([at("step 20", 21), at("step 8", 9)] * 2, TIMEOUT - 1)],
        named(1, Kind.STALLED, f"has entered nothing after step 8 {LATE} in step 20."),
    ),
    "who is far behind, and silent": (
        [([at("step 8", 9)] * 3, 2), ([at("step 20", 21), at("step 8", 9)] * 2, TIMEOUT - 1, {1})],
        named(1, Kind.SILENT, "has not been heard of for 10 seconds. It has entered step 8 last."),
    ),
    "before the first call they wait for each other's devices": (
        [([{}, {"waits": 1}, {"waits": 1}], TIMEOUT - 1)],
        named(0, Kind.STALLED, f"has not entered the first JAX operation {LATE}."),
    ),
    "who waits for a checkpoint lets the others do something else": (
        [
            ([at("step 6", 7), at("wait 1"), at("wait 1")], 1000),
            ([at("step 6", 7) | LEFT, at("wait 1"), at("wait 1")], 0),
        ],
        has_left(0, "wait 1"),
    ),
    "who compiles has longer": (
        [([{"calls": 2, "waits": 1}, *[{"calls": 2, "waits": 2, "inner": "compile"}] * 2], 599)],
        named(
            0, Kind.STALLED, "has stood still in nothing for 600 seconds, and others wait for it."
        ),
    ),
    "but not who is silent in it": (
        [([{"calls": 2, "inner": "compile"}] * 3, TIMEOUT - 1, {1})],
        named(1, Kind.SILENT, "has not been heard of for 10 seconds."),
    ),
    "other rows than most": (
        [
            (
                [at("step 6", 7) | USUAL, at("step 6", 7) | OTHERS, at("step 6", 7) | USUAL],
                ROWS_SECONDS - 1,
            )
        ],
        named(1, Kind.STALLED, FOUND_ROWS.format(0)),
    ),
    "of two that differ the one that has changed": (
        [([at("step 6", 7) | OTHERS, at("step 6", 7) | USUAL, at("step 6", 7)], ROWS_SECONDS - 1)],
        named(0, Kind.STALLED, FOUND_ROWS.format(1)),
    ),
    # Process 0 is a step ahead, and that step has other rows in all of them.
    "rows of a later call say nothing of this one": (
        [
            (
                [at("step 7") | OTHERS | {"rows_since": 8}, *[at("step 6", 7) | USUAL] * 2],
                TIMEOUT - 1,
            )
        ],
        named(1, Kind.STALLED, f"has not entered step 7 {LATE}."),
    ),
    "all that have come to their ends may go": ([([LEFT] * 3, 0)], Verdict(Kind.DONE)),
}


A, B, PUT = (1, 9, "x[8]", "a"), (1, 2, "x[8]", "a"), "another params and x[8]"
ROWS = (
    "Pass as many rows, of the same dtypes, in every process, or weight=, the batch's entry that "
    "counts them."
)
# What three processes were given, and what is found at once.
GIVEN: dict[str, tuple[list[dict[str, object]], str | None]] = {
    "the same, of which two are ahead": (
        [gave(A), gave((1, 20, *A[2:])), gave((1, 10, *A[2:]))],
        None,
    ),
    "other rows in a call that has ended": (
        [gave(A), gave(B, (3, 3, "x[4]", "b"), (4, 9, "x[8]", "c")), gave(A)],
        f"process 1 has entered step 3 with x[4], and process 0 with x[8]. {ROWS}",
    ),
    "other rows in a call that has not ended": (
        [gave(A), gave((1, 8, *A[2:]), (9, 9, "x[4]", "b")), gave(A)],
        None,
    ),
    "other rows in the last call": (
        [gave(A) | LEFT, gave(A) | LEFT, gave((1, 8, *A[2:]), (9, 9, "x[4]", "b")) | LEFT],
        f"process 2 has entered step 9 with x[4], and process 0 with x[8]. {ROWS}",
    ),
    "another state": (
        [gave(B, (3, 3, PUT, "b"), (4, 9, "x[8]", "c")), gave(A), gave(A)],
        f"process 0 has entered step 3 with {PUT}, and process 1 with x[8]. Put the same arrays "
        f"into the state, or the variables, in every process.",
    ),
    "other rows in a call that is forgotten": (
        [gave((7, 9, "x[8]", "d")), gave((7, 9, "x[8]", "e")), gave((7, 9, "x[8]", "d"))],
        f"process 1 was given something else than process 0 before step 7. {ROWS}",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_earlier_calls_were_given_is_compared(name: str, job: Job):
    job.says, sentence = GIVEN[name]
    found = job.run(1)
    assert (found and found.sentence) == sentence
    assert found is None or found.code == PROCESS_STALLED


def entered(rows: list[str]) -> list[Report]:
    """What a process says after each of some steps with these rows."""
    told, progress = [], Progress()
    for number, own in enumerate(rows, 1):
        progress.note(calls=number, latest=f"step {number}")
        progress.take(own)
        told.append(progress.now)
    return told


@pytest.mark.parametrize("sizes", [1, 2, 5])
@pytest.mark.parametrize("odd", [None, 0, 40, 333])
def test_one_step_with_other_rows_is_found_however_often_they_change(sizes: int, odd: int | None):
    rng = np.random.default_rng(0)
    rows = [f"float32[{4 * n}]" for n in rng.integers(sizes, size=500)]
    others = [f"{own}[odd]" if number == odd else own for number, own in enumerate(rows)]
    first, second = entered(rows), entered(others)
    judge, found = Judge(2, Timeouts(TIMEOUT), 0.0), None
    for number in range(0, 450, 7):
        # They tell it at other moments.
        ahead = min(499, number + int(rng.integers(10, 50)))
        reports = enumerate((first[number], second[ahead]))
        told = {k: dataclasses.replace(report, beat=number + 1) for k, report in reports}
        assert all(Report.parse(str(report)) == report for report in told.values())
        found = judge.hear(told, float(number))
        if found is not None:
            break
    if odd is None:
        assert found is None
    else:
        assert found is not None
        assert "process 1 " in found.sentence
        assert odd < number < odd + 100


@pytest.mark.parametrize("name", STORIES)
def test_who_is_named_and_when(name: str, job: Job):
    phases, verdict = STORIES[name]
    for says, seconds, *silent in phases:
        job.says, job.silent = says[:3], set().union(*silent)
        assert job.run(seconds) is None
    assert job.run(FAILURE_SECONDS + 1) == verdict


def test_a_process_that_is_behind_but_moves_is_let_be(job: Job):
    for calls in range(1, 30):
        job.says[0] = {"calls": calls + 2}
        job.says[1] = job.says[2] = {"calls": calls}
        assert job.run(TIMEOUT - 2) is None


def test_reports_and_verdicts_are_read_as_they_were_written():
    rows = "float32[8,3],key<fry>[8]"
    told = (3, 8, "step 7", State.FAILED, "ValueError", 2, "train.py:41", rows, 7)
    given = (Given(1, 2, "step 1", rows, "0a"), Given(3, 6, "step 3", "", "1b"))
    report = Report(*told, "init 1, step 6", 2, "compile", given, "step 7", "2c")
    assert Report.parse(str(report)) == report
    assert Report.parse(str(Report(0, 2, "init 1"))) == Report(0, 2, "init 1")
    for verdict in (
        Verdict.of(Kind.STALLED, 2, "has not entered step 8", "<string>:1"),
        Verdict(Kind.FAILED, 0, "process 0 ended with ValueError."),
        Verdict(Kind.STALLED, 2, f"process 2 has entered step 8 with {rows}."),
    ):
        assert Verdict.parse(str(verdict)) == verdict
    assert Verdict(Kind.STALLED).code == Verdict(Kind.SILENT).code == PROCESS_STALLED
    assert Verdict(Kind.DIED).code == Verdict(Kind.LEFT).code == PROCESS_LOST


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (Report, {"state": "asleep"}),
        (Report, {"beat": -1}),
        (Report, {"beat": int("9" * 40)}),
        (Report, {"calls": "2"}),
        (Report, {"latest": "\x1b[2J 3"}),
        (Report, {"error": "\x1b]0;x\x07"}),
        (Report, {"place": "\x1b[2J:1"}),
        (Report, {"rows": "\u202e"}),
        (Report, {"rows": "x\n"}),
        (Report, {"before": "\x1b[2J"}),
        (Report, {"error": "x" * 1_000_000}),
        (Report, {"further": 1}),
        (Verdict, {"kind": "shut"}),
        (Verdict, {"process": None}),
        (Verdict, {"sentence": "\x1b[2J"}),
    ],
)
def test_what_is_no_report_and_no_verdict_is_none(kind: type, changed: dict[str, object]):
    given = Report(1) if kind is Report else DIED
    body = dataclasses.asdict(given)
    assert kind.parse(json.dumps(body)) == given
    assert kind.parse(json.dumps(body | changed)) is None


@pytest.mark.parametrize("text", ["", "1", "died", "[" * 1999, "{}"])
def test_other_text_is_none(text: str):
    assert Report.parse(text) is None
    assert Verdict.parse(text) is None


def test_each_kind_of_call_has_its_own_timeout():
    timeouts = Timeouts.read({"start": 900, "step": 60, "evaluate": 300, "init": 700}, 120)
    calls = ("nothing", "init 1", "steps 1", "step 1", "step 2", "finish 1", "evaluate 1")
    assert [timeouts.of(call) for call in calls] == [900, 700, 900, 900, 60, 60, 300]
    assert Timeouts.read({"alone": 5}, 120).of("step 7") == 120
    for call in calls:
        assert Timeouts.read(7, 120).of(call) == 7


@pytest.mark.parametrize(
    ("call", "seconds"), [("step 1", 50.0), ("step 2", TIMEOUT), ("evaluate 3", 20.0)]
)
def test_a_process_is_named_after_the_timeout_of_what_others_wait_in(call: str, seconds: float):
    job = Job()
    job.judge = Judge(3, Timeouts(TIMEOUT, {"start": 50.0, "evaluate": 20.0}), 0.0)
    job.says = [{"calls": 3, "latest": call}] * 2 + [{"calls": 2, "place": "data.py:7"}]
    assert job.run(seconds - 1) is None
    verdict = job.run(2)
    assert verdict.sentence == (
        f"process 2 has not entered {call} for {int(seconds)} seconds, and others wait for it. It "
        f"stands at data.py:7."
    )
