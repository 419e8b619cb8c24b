"""Endings: waits for the processes of a launcher, passes signals on, and ends them together."""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from crossshard.distributed.job import CONNECTS, told_launcher
from crossshard.distributed.supervisor.reports import PROCESS_LOST, PROCESS_STALLED, Kind, Verdict

# How long processes that leave because of another one wait for each other, at most.
_LEAVING_SECONDS = 5.0
_EVERY = 0.02
_ENDING = tuple(getattr(signal, f"SIG{name}") for name in ("INT", "QUIT", "TERM", "HUP"))
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_BECAUSE_OF_ANOTHER = (PROCESS_LOST, PROCESS_STALLED)
_OTHERS = "the others are ended"


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
      code: its exit code.
      failed: which of its processes failed first; ``None`` if none did, or nobody knows.
      why: what there is to say of it.
    """

    code: int
    failed: int | None = None
    why: str = ""


class Family:
    """The processes of a launcher, which get its signals and end together.

    Args:
      grace: how many seconds they have to end before they are killed.
      verdicts: the file in which they write why they leave.
    """

    def __init__(self, grace: float, verdicts: Path) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._grace = grace
        self._verdicts = verdicts
        self._received: list[int] = []
        self._passed_on = 0
        self._until = math.inf

    @property
    def interrupted(self) -> bool:
        """Whether a signal has come."""
        return bool(self._received)

    @property
    def must_end(self) -> bool:
        """Whether a signal has come that ends them."""
        return self._until < math.inf

    @contextlib.contextmanager
    def takes_signals(self) -> Iterator[None]:
        """Keep signals to this process for the others, until ``pass_on`` sends them."""

        def receive(number: int, frame: object) -> None:
            self._received.append(number)
            if number in _ENDING:
                self._until = min(self._until, time.monotonic() + self._grace)

        before = {number: signal.signal(number, receive) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def pass_on(self) -> None:
        """Send what has been received to all processes.

        Not from the handler of the signal, which may run while a process is being started.
        """
        while self._passed_on < len(self._received):
            number = self._received[self._passed_on]
            self._passed_on += 1
            for process in self.processes:
                _send(process, number)

    def wait(self, number: int) -> Ending:
        """Wait until so many processes have ended well, one has not, or their time is over."""
        left = dict(enumerate(self.processes))
        while left and time.monotonic() < self._until:
            self.pass_on()
            for own, process in list(left.items()):
                if process.poll() is not None:
                    del left[own]
                if process.returncode:
                    ending = self._of_failure(own, process.returncode, left)
                    # After Ctrl-C everybody knows why.
                    is_news = number > 1 and not self._received
                    return ending if is_news else dataclasses.replace(ending, why="")
            ended = {*range(len(self.processes))} - left.keys()
            if left and ended and not self._received:
                absent = self._absent(ended)
                if absent is not None:
                    return absent
            time.sleep(_EVERY)
        if not left and len(self.processes) == number:
            return Ending(0)
        asked = next(each for each in self._received if each in _ENDING)
        late = " ".join(map(str, left))
        why = f"killed {self._grace:g} seconds after {signal.Signals(asked).name}: process {late}"
        return Ending(128 + asked, why=why if left else "")

    def end(self) -> None:
        """End all processes that still run, and what they have started."""
        if not self.must_end:
            for process in self.processes:
                if process.poll() is None:
                    _send(process, signal.SIGTERM)
        self._wait_for(self.processes, self._grace)
        for process in self.processes:
            _send(process, signal.SIGKILL)
            process.wait()

    def _of_failure(self, own: int, code: int, left: dict[int, subprocess.Popen[bytes]]) -> Ending:
        """The ending of a job in which a process has failed, perhaps because of another one."""
        if code in _BECAUSE_OF_ANOTHER or self._has_said_why(own):
            self._wait_for(left.values(), _LEAVING_SECONDS)
            verdict = self._verdict()
            if verdict is None:
                return Ending(code, None, f"process {own} ended with code {code}; {_OTHERS}")
            # They may see a death before this process can ask for its code.
            own, its = verdict.process, self.processes[verdict.process].returncode
            if verdict.kind is Kind.SILENT:
                # It is stopped, or does not run Python, and saves nothing.
                _send(self.processes[own], signal.SIGKILL)
            if not its or its in _BECAUSE_OF_ANOTHER:
                return Ending(its or code, own, f"{_in_short(verdict)}; {_OTHERS}")
            code = its
        how = f"with code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
        return Ending(
            code if code > 0 else 128 - code, own, f"process {own} ended {how}; {_OTHERS}"
        )

    def _wait_for(self, processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
        """Wait until these have ended, or their time is over."""
        until = min(self._until, time.monotonic() + seconds)
        while time.monotonic() < until and any(each.poll() is None for each in processes):
            self.pass_on()
            time.sleep(_EVERY)

    def _verdict(self) -> Verdict | None:
        """Why they leave: what process 0 says, which judges, or else the first that says it."""
        said = sorted(told_launcher(self._verdicts), key=lambda words: words[0] != "0")
        found = (Verdict.parse(text) for _, text in said)
        return next((each for each in found if each and each.process < len(self.processes)), None)

    def _has_said_why(self, own: int) -> bool:
        told = told_launcher(self._verdicts)
        return any(who == str(own) and Verdict.parse(text) for who, text in told)

    def _absent(self, ended: set[int]) -> Ending | None:
        """The ending of a job if one of those that ended well is waited for by those that connect.

        Those that connect wait for all, and come to their ends together.
        """
        connected = {who for who, what in told_launcher(self._verdicts) if what == CONNECTS}
        absent = next((each for each in sorted(ended) if str(each) not in connected), None)
        if not connected or absent is None:
            return None
        verdict = Verdict(Kind.LEFT, absent, "initialize")
        return Ending(verdict.code, absent, f"{_in_short(verdict)}; {_OTHERS}")


def _in_short(verdict: Verdict) -> str:
    return verdict.sentence().partition(". ")[0].rstrip(".")


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    # The group may outlive the process that led it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
