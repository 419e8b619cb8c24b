"""Judge: what process 0 makes of the reports of all processes; no clock and no network here."""

import collections
import dataclasses
from collections.abc import Mapping

from crossshard.distributed.progress import NO_ROWS
from crossshard.distributed.supervisor.reports import Kind, Report, State, Verdict
from crossshard.distributed.supervisor.timeouts import Timeouts

# After a process has failed or left: long enough to see whether it did because another one died, or
# whether the others do so too.
FAILURE_SECONDS = 2.5
# Processes that all see that they have other rows than the others raise sooner.
ROWS_SECONDS = 5.0


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
