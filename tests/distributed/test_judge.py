"""What process 0 makes of reports, at times that the test makes up."""

import pytest

from crossshard.distributed import PROCESS_LOST, PROCESS_STALLED
from crossshard.distributed.judge import FAILURE_SECONDS, Judge
from crossshard.distributed.reports import Kind, Report, State, Verdict

TIMEOUT = 10.0


class Job:
    """Three processes that report every second, each what it last said."""

    def __init__(self) -> None:
        self.judge = Judge(3, TIMEOUT, 0.0)
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
    assert job.run(2) == Verdict(Kind.BEHIND, 2, "step 8", 10)


def test_a_process_that_is_behind_but_moves_is_let_be(job: Job):
    for calls in range(1, 30):
        job.says[0] = {"calls": calls + 2}
        job.says[1] = job.says[2] = {"calls": calls}
        assert job.run(TIMEOUT - 2) is None


def test_a_silent_process_is_named_whatever_it_has_entered(job: Job):
    job.run(3)
    job.silent = {1}
    assert job.run(2 * TIMEOUT) == Verdict(Kind.SILENT, 1, seconds=10)


def test_a_death_that_its_machine_tells_is_believed_at_once(job: Job):
    job.says[2] = {"gone": 1}
    assert job.run(1) == Verdict(Kind.DIED, 1)


def test_a_process_that_has_left_may_be_gone(job: Job):
    job.says[1] = {"state": State.LEFT}
    job.says[2] = {"gone": 1}
    assert job.run(100 * TIMEOUT) is None


def test_a_failure_is_that_of_the_first_that_tells_of_it(job: Job):
    job.says[2] = {"state": State.FAILED, "error": "ValueError"}
    assert job.run(FAILURE_SECONDS / 2) is None
    job.says[0] = {"state": State.FAILED, "error": "JaxRuntimeError"}
    assert job.run(FAILURE_SECONDS) == Verdict(Kind.FAILED, 2, "ValueError")


def test_a_failure_because_another_process_has_died_names_that_one(job: Job):
    job.run(3)
    job.silent = {1}
    job.says[0] = job.says[2] = {"state": State.FAILED, "error": "JaxRuntimeError"}
    assert job.run(FAILURE_SECONDS + 1) == Verdict(Kind.DIED, 1)


def test_a_process_that_left_is_named_once_another_needs_it(job: Job):
    job.says = [{"calls": 3}, {"calls": 3, "state": State.LEFT}, {"calls": 3}]
    assert job.run(100 * TIMEOUT) is None
    job.says[0] = {"calls": 4, "latest": "step 3"}
    assert job.run(1) == Verdict(Kind.LEFT, 1, "step 3")


def test_all_that_have_come_to_their_ends_may_go(job: Job):
    job.says = [{"state": State.LEFT}] * 3
    assert job.run(1) == Verdict(Kind.DONE)


def test_reports_and_verdicts_are_read_as_they_were_written():
    report = Report(3, 8, "step 7", State.FAILED, "ValueError", 2)
    assert Report.parse(str(report)) == report
    assert Report.parse(str(Report(0, 2, "init 1"))) == Report(0, 2, "init 1")
    for verdict in (Verdict(Kind.BEHIND, 2, "step 8", 120), Verdict(Kind.FAILED, 0, "ValueError")):
        assert Verdict.parse(str(verdict), 3) == verdict
    assert Verdict(Kind.BEHIND).code == Verdict(Kind.SILENT).code == PROCESS_STALLED
    assert Verdict(Kind.DIED).code == Verdict(Kind.LEFT).code == PROCESS_LOST


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1 2 step 3 running nothing",
        "1 2 step 3 asleep nothing 0",
        "-1 2 step 3 running nothing 0",
        f"{'9' * 40} 2 step 3 running nothing 0",
        "1 2 \x1b[2J 3 running nothing 0",
        "1 2 step 3 running \x1b]0;x\x07 0",
        "1 2 step ² running nothing 0",
        "1 2 step 3 running nothing 0\n",
        "x" * 1_000_000,
    ],
)
def test_what_is_no_report_is_none(text: str):
    assert Report.parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "died",
        "died 3 0 nothing",
        "shut 1 0 nothing",
        "died 1 0 a;b",
        "died 1 0 step 7 8",
        "d" * 999,
    ],
)
def test_what_is_no_verdict_on_a_process_of_the_job_is_none(text: str):
    assert Verdict.parse(text, 3) is None
