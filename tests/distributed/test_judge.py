"""What process 0 makes of reports, at times that the test makes up."""

import dataclasses
import json

import pytest

from crossshard.distributed import PROCESS_LOST, PROCESS_STALLED
from crossshard.distributed.judge import (
    FAILURE_SECONDS,
    ROWS_SECONDS,
    Judge,
    Kind,
    Report,
    State,
    Timeouts,
    Verdict,
)

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


def test_processes_that_are_equally_far_may_take_as_long_as_they_want(job: Job):
    assert job.run(100 * TIMEOUT) is None


def test_the_process_that_is_behind_is_named_once_the_others_have_waited(job: Job):
    job.says = [{"calls": 8, "latest": "step 7"}] * 3
    assert job.run(5 * TIMEOUT) is None
    job.says[0] = job.says[1] = {"calls": 9, "latest": "step 8"}
    # Not from its own last step on: the others have not waited before.
    assert job.run(TIMEOUT - 1) is None
    assert job.run(2) == Verdict(
        Kind.STALLED,
        2,
        "process 2 has not entered step 8 for 10 seconds, and others wait for it.",
    )


def test_a_process_that_is_behind_but_moves_is_let_be(job: Job):
    for calls in range(1, 30):
        job.says[0] = {"calls": calls + 2}
        job.says[1] = job.says[2] = {"calls": calls}
        assert job.run(TIMEOUT - 2) is None


def test_a_silent_process_is_named_whatever_it_has_entered(job: Job):
    job.run(3)
    job.silent = {1}
    assert job.run(2 * TIMEOUT) == Verdict(
        Kind.SILENT, 1, "process 1 has not been heard of for 10 seconds."
    )


def test_a_death_that_its_machine_tells_is_believed_at_once(job: Job):
    job.says[2] = {"gone": 1}
    assert job.run(1) == DIED


def test_a_process_that_has_left_may_be_gone(job: Job):
    job.says[1] = {"state": State.LEFT}
    job.says[2] = {"gone": 1}
    assert job.run(100 * TIMEOUT) is None


def test_a_failure_is_that_of_the_first_that_tells_of_it(job: Job):
    job.says[2] = {"state": State.FAILED, "error": "ValueError"}
    assert job.run(FAILURE_SECONDS / 2) is None
    job.says[0] = {"state": State.FAILED, "error": "JaxRuntimeError"}
    assert job.run(FAILURE_SECONDS) == Verdict(Kind.FAILED, 2, "process 2 ended with ValueError.")


def test_a_failure_because_another_process_has_died_names_that_one(job: Job):
    job.run(3)
    job.silent = {1}
    job.says[0] = job.says[2] = {"state": State.FAILED, "error": "JaxRuntimeError"}
    assert job.run(FAILURE_SECONDS + 1) == DIED


def test_a_process_that_left_is_named_once_another_needs_it(job: Job):
    job.says = [{"calls": 3}, {"calls": 3, "state": State.LEFT}, {"calls": 3}]
    assert job.run(100 * TIMEOUT) is None
    job.says[0] = {"calls": 4, "latest": "step 3"}
    # The other may be about to leave, too.
    assert job.run(FAILURE_SECONDS - 1) is None
    assert job.run(2) == has_left(1, "step 3")


def test_who_has_left_by_another_way_is_named_though_it_has_entered_as_much(job: Job):
    trains = {"calls": 8, "latest": "step 7", "before": "nothing, init 1, step 6"}
    job.says = [trains, trains | {"latest": "finish 1", "state": State.LEFT}, trains]
    assert job.run(FAILURE_SECONDS - 1) is None
    assert job.run(2) == has_left(1, "step 7")
    # And more than the others.
    ends = {"calls": 9, "latest": "save 4", "before": "step 6, finish 1", "state": State.LEFT}
    other = Job()
    other.says = [trains, trains, ends]
    assert other.run(FAILURE_SECONDS + 1) == has_left(2, "step 7")


def test_who_enters_something_else_is_named_with_both(job: Job):
    trains = {"calls": 8, "latest": "step 7", "before": "step 6"}
    saves = {"calls": 9, "latest": "save 1", "before": "step 6, evaluate 1", "place": "a.py:3"}
    job.says = [saves, trains, trains]
    assert job.run(TIMEOUT - 1) is None
    verdict = job.run(2)
    assert (verdict.kind, verdict.process, verdict.code) == (Kind.STALLED, 0, PROCESS_STALLED)
    assert verdict.sentence == (
        "process 0 has entered evaluate 1, and process 1 step 7 in its place. Every process must "
        "make the same calls, in the same order. It stands at a.py:3."
    )


def test_who_stands_still_in_a_call_that_all_have_entered_is_named_with_it(job: Job):
    saves = {"calls": 8, "latest": "save 2", "waits": 1}
    job.says = [saves | {"waits": 0}, saves, saves]
    assert job.run(TIMEOUT - 1) is None
    verdict = job.run(2)
    assert verdict.sentence == (
        "process 0 has stood still in save 2 for 10 seconds, and others wait for it."
    )


@pytest.mark.parametrize("silent", [False, True])
def test_of_a_process_that_is_far_behind_its_own_last_step_is_said(job: Job, silent: bool):
    job.says = [{"calls": 9, "latest": "step 8"}] * 3
    job.run(2)
    job.silent = {1} if silent else set()
    job.says[0] = job.says[2] = {"calls": 21, "latest": "step 20"}
    assert job.run(2 * TIMEOUT).sentence == (
        "process 1 has not been heard of for 10 seconds. It has entered step 8 last."
        if silent
        else "process 1 has entered nothing after step 8 for 10 seconds, and others wait for it in "
        "step 20."
    )


def test_before_the_first_call_they_wait_for_each_others_devices(job: Job):
    job.says = [{}, {"waits": 1}, {"waits": 1}]
    assert job.run(2 * TIMEOUT).sentence == (
        "process 0 has not entered the first JAX operation for 10 seconds, and others wait for it."
    )


def test_who_waits_for_a_checkpoint_lets_the_others_do_something_else(job: Job):
    job.says = [{"calls": 7, "latest": "step 6"}] + [{"calls": 8, "latest": "wait 1"}] * 2
    assert job.run(100 * TIMEOUT) is None
    job.says[0] = {"calls": 7, "latest": "step 6", "state": State.LEFT}
    assert job.run(FAILURE_SECONDS + 1) == has_left(0, "wait 1")


def test_who_compiles_has_longer(job: Job):
    job.says = [{"calls": 2, "waits": 1}] + [{"calls": 2, "waits": 2, "inner": "compile"}] * 2
    assert job.run(590) is None
    assert job.run(20).kind is Kind.STALLED
    # But not who is silent in it.
    other = Job()
    other.says, other.silent = [{"calls": 2, "inner": "compile"}] * 3, {1}
    assert other.run(TIMEOUT + 1).kind is Kind.SILENT


def test_all_that_have_come_to_their_ends_may_go(job: Job):
    job.says = [{"state": State.LEFT}] * 3
    assert job.run(1) == Verdict(Kind.DONE)


def test_reports_and_verdicts_are_read_as_they_were_written():
    rows = "float32[8,3],key<fry>[8]"
    told = (3, 8, "step 7", State.FAILED, "ValueError", 2, "train.py:41", rows, 7)
    report = Report(*told, "init 1, step 6", 2, "compile")
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


def test_who_enters_a_step_with_other_rows_than_most_is_named(job: Job):
    usual = {"calls": 7, "latest": "step 6", "rows": "float32[8,3]", "rows_since": 2}
    job.says = [usual, usual | {"rows": "float32[4,3]", "rows_since": 7}, usual]
    assert job.run(ROWS_SECONDS - 1) is None
    assert job.run(2) == Verdict(
        Kind.STALLED,
        1,
        "process 1 has entered step 6 with float32[4,3], and process 0 with float32[8,3]. Pass as "
        "many rows, of the same dtypes, in every process, or weight=, the batch's entry that "
        "counts them.",
    )


def test_of_two_that_differ_the_one_that_has_changed_is_named(job: Job):
    usual = {"calls": 7, "latest": "step 6", "rows": "float32[8,3]", "rows_since": 2}
    job.says = [usual | {"rows": "float32[4,3]", "rows_since": 7}, usual, {"calls": 7}]
    found = job.run(2 * ROWS_SECONDS)
    assert (found.kind, found.process) == (Kind.STALLED, 0)
    assert " and process 1 with float32[8,3]" in found.sentence


def test_rows_of_a_later_call_say_nothing_of_this_one(job: Job):
    # Process 0 is a step ahead, and this step has other rows in all of them.
    usual = {"calls": 7, "latest": "step 6", "rows": "float32[8,3]", "rows_since": 2}
    ahead = {"calls": 8, "latest": "step 7", "rows": "float32[4,3]", "rows_since": 8}
    job.says = [ahead, usual, usual]
    assert job.run(TIMEOUT - 1) is None
    assert " has not entered step 7 " in job.run(2).sentence


def test_each_kind_of_call_has_its_own_timeout():
    timeouts = Timeouts.read({"start": 900, "step": 60, "evaluate": 300, "init": 700}, 120)
    calls = ("nothing", "init 1", "step 1", "step 2", "finish 1", "evaluate 1")
    assert [timeouts.of(call) for call in calls] == [900, 700, 900, 60, 60, 300]
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
