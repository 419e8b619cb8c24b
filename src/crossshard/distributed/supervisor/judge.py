"""Judge: what process 0 makes of the reports of all processes; no clock and no network here."""

import collections
import dataclasses
from collections.abc import Mapping

from crossshard.distributed.progress import NO_ROWS
from crossshard.distributed.supervisor.reports import Kind, Report, State, Verdict
from crossshard.distributed.supervisor.timeouts import Timeouts

# After a process has failed: long enough to see whether it did because another one died.
FAILURE_SECONDS = 2.5
# Processes that all see that they have other rows than the others raise sooner.
ROWS_SECONDS = 5.0


@dataclasses.dataclass
class _Heard:
    """The latest report of a process, and since when it has not changed."""

    report: Report
    beat_since: float
    calls_since: float
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
        if report.calls != heard.report.calls:
            heard.calls_since = now
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
        many = collections.Counter(report.rows for report in known.values())
        # Most of them, or those that have had their rows for longer, are not the odd ones.
        rank = lambda process: (-many[known[process].rows], known[process].rows_since)
        order = sorted(known, key=rank)
        usual = order[0]
        odd = next(process for process in order if known[process].rows != known[usual].rows)
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
        if all(heard.report.state is State.LEFT for heard in self._heard.values()):
            return Verdict(Kind.DONE)
        ahead = max((heard.report for heard in self._heard.values()), key=lambda r: r.calls)
        for process, heard in self._heard.items():
            if heard.report.calls >= ahead.calls:
                heard.behind_since = None
                continue
            if heard.report.state is State.LEFT:
                return Verdict(Kind.LEFT, process, ahead.latest)
            if heard.behind_since is None:
                heard.behind_since = now
            waited = now - max(heard.behind_since, heard.calls_since)
            seconds = self._timeouts.of(ahead.latest)
            if heard.report.state is State.RUNNING and waited >= seconds:
                place = heard.report.place
                return Verdict(Kind.BEHIND, process, ahead.latest, int(waited), place)
        return None

    def _of_silence(self, now: float) -> Verdict | None:
        for process, heard in self._heard.items():
            silent = now - heard.beat_since
            seconds = self._timeouts.of(heard.report.latest)
            if heard.report.state is State.RUNNING and silent >= seconds:
                return Verdict(Kind.SILENT, process, seconds=int(silent), place=heard.report.place)
        return None
