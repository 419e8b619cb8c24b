"""Launcher: starts the processes of a job on this machine, and ends them together."""

import contextlib
import dataclasses
import inspect
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from typing import IO

from crossshard.distributed.job import (
    ADDRESS,
    DEVICES,
    LOOPBACK,
    NUMBER,
    OWN,
    SPARE,
    check_unused,
    listen,
)
from crossshard.distributed.judge import PROCESS_LOST, PROCESS_STALLED, Kind, Verdict, left_before
from crossshard.distributed.programs import variables_for
from crossshard.distributed.watch import (
    CONNECTS,
    RESTORED,
    RUNS,
    STANDS,
    VERDICTS,
    told_launcher,
)
from crossshard.errors import ArgumentError

# How long a process may take to end after a signal, to save a checkpoint; as under Slurm.
GRACE_SECONDS = 30.0
# How long to read what an ended process wrote, if another one that it started keeps its pipe.
_DRAIN_SECONDS = 1.0
# How long to wait, at most, for all processes that leave because of another one.
_LEAVING_SECONDS = 5.0
# On CPUs XLA takes and frees memory in each step. So glibc keeps it, in large pages of one heap for
# all threads, instead of handing it back to Linux.
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:"
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
)
_EVERY = 0.02
_ENDING = tuple(getattr(signal, f"SIG{name}") for name in ("INT", "QUIT", "TERM", "HUP"))
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_BECAUSE_OF_ANOTHER = (PROCESS_LOST, PROCESS_STALLED)


def launch(
    command: Sequence[str],
    number: int,
    restarts: int,
    min_processes: int | None,
    *,
    spares: int = 0,
    stdout: IO[bytes],
    stderr: IO[bytes],
    cpu_devices: int | None = None,
    port: int | None = None,
    grace: float = GRACE_SECONDS,
) -> int:
    """Run a command in several processes, again after a failure; return the last run's exit code.

    Each line that a process writes is written with the number of the process before it. Signals go
    to all processes, which are killed if they have not ended in time. When one fails, the others
    are ended; the code is that of the first that failed, 128 plus the number of a signal as in
    shells, and 0 if none did. They end with the launcher, too, if that is killed. A run that a
    signal to the launcher has ended is not started again.

    Args:
      min_processes: leave out the process that failed, and its GPU, while so many are left;
        ``None`` starts as many again.
      cpu_devices: how many virtual CPU devices each of them has; ``None`` for one GPU each, or what
        else JAX finds.
      spares: how many processes to keep that have run the command up to ``initialize`` and wait
        there, once the run has taken a step; the next run takes them, before it starts others.
      port: the port at which they meet; any free one if ``None``.
      grace: how many seconds processes have to end, after a signal or a failure.
    """
    # For each process which GPU it has.
    slots = list(range(number))
    failure: _Failure | None = None
    with (
        tempfile.TemporaryDirectory(prefix="crossshard-", ignore_cleanup_errors=True) as folder,
        contextlib.closing(_Spares(command)) as waiting,
    ):
        for left in range(restarts, -1, -1):
            if port is not None:
                check_unused(LOOPBACK, port)
            given = {ADDRESS: f"{LOOPBACK}:{port or listen(LOOPBACK, 0)}", NUMBER: str(len(slots))}
            given["PYTHONUNBUFFERED"] = "1"
            # What one run has compiled, the next one takes.
            given |= variables_for(folder) if restarts else {}
            if cpu_devices is not None:
                given |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cpu_devices)}
                # Enough threads that collectives of virtual devices never deadlock.
                given["NPROC"] = str(4 * cpu_devices)
                given["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", TUNABLES)
            waiting.wanted = spares if left else 0
            waiting.environment = {**os.environ, **given}
            with _Run(folder, waiting, stdout, stderr, grace, failure) as run:
                for own, slot in enumerate(slots):
                    if run.asked is not None:
                        break
                    # One GPU each, as under Slurm and Open MPI.
                    of_slot = {DEVICES: str(slot)} if cpu_devices is None else {}
                    environment = {**os.environ, **given, OWN: str(own), **of_slot}
                    run.start(command, environment, f"[{own:>{len(str(len(slots) - 1))}}] ")
                code, failed = run.wait(len(slots))
            if code == 0 or run.received or left == 0:
                break
            failure = run.failure or failure
            if failed is not None and min_processes is not None and len(slots) > min_processes:
                del slots[failed]
            many = f"{len(slots)} process{'es' * (len(slots) > 1)}"
            times = f"{left - 1} more restart{'s' * (left != 2)}"
            stderr.write(f"crossshard: started again with {many}; {times} left.\n".encode())
            stderr.flush()
    return code


@dataclasses.dataclass
class _Failure:
    """How a run ended: in words, when, and after how many steps, if that is known."""

    sentence: str
    since: float
    steps: int | None = None

    def told(self, restored: str | None) -> str:
        """Return the line that says what it has cost, once the next run has taken a step.

        ``restored`` is what that has restored, and the number of steps before it; ``None`` if
        nothing.
        """
        steps, _, source = (restored or "0 the beginning").partition(" ")
        seconds = time.monotonic() - self.since
        line = f"{self.sentence}; trains again after {seconds:.1f} seconds, from {source}"
        if self.steps is None or not steps.isdecimal() or self.steps < int(steps):
            return line
        lost = self.steps - int(steps)
        were = "step was" if lost == 1 else "steps were"
        return f"{line}: {lost} {were} lost, of {self.steps}"


class _Spares:
    """Processes that have run a command up to ``initialize``, and wait there for the next run.

    Attributes:
      wanted: how many there are to be.
      environment: the variables that are the same for all processes of a run.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.wanted, self.environment = 0, dict[str, str]()
        self._command = command
        self._waiting: list[subprocess.Popen[bytes]] = []

    def fill(self) -> None:
        """Start those that are missing; one that cannot be started is none."""
        with contextlib.suppress(OSError):
            while len(self._waiting) < self.wanted:
                environment = {**self.environment, SPARE: "1"}
                self._waiting.append(_started(self._command, environment, subprocess.PIPE))

    def take(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
        """Let one go on with these variables, and return it; ``None`` if none waits."""
        while self._waiting:
            process = self._waiting.pop(0)
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(environment).encode() + b"\n")
                process.stdin.close()
                if process.poll() is None:
                    return process
        return None

    def groups(self) -> list[int]:
        """Return the process groups of those that wait."""
        return [process.pid for process in self._waiting]

    def close(self) -> None:
        """End all of them, without waiting for what they have started, which may have the pipes."""
        for process in self._waiting:
            # Which closes its pipes, and collects it.
            with process:
                _send(process.pid, signal.SIGKILL)


def _started(
    command: Sequence[str], environment: dict[str, str], stdin: int
) -> subprocess.Popen[bytes]:
    # A group of its own, so that what it has started ends with it.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


class _Run:
    """The processes of a run, which get the launcher's signals and end together."""

    def __init__(
        self,
        folder: str,
        waiting: _Spares,
        stdout: IO[bytes],
        stderr: IO[bytes],
        grace: float,
        before: _Failure | None,
    ) -> None:
        # How it ends, and how the run before it has ended, until that has been told.
        self.failure: _Failure | None = None
        self._before_it = before
        self._waiting = waiting
        self._has_begun = False
        self._looked = 0.0
        self.received: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        # One thread writes whole lines, so that those of two processes never mix, and a process
        # that prints does not wait for a reader that pauses.
        self._lines: queue.SimpleQueue[tuple[IO[bytes], bytes] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._stdout, self._stderr = stdout, stderr
        self._grace = grace
        # In which they write why they leave.
        number, self._verdicts = tempfile.mkstemp(dir=folder)
        os.close(number)
        # It gets the id of each process group that is started, and ends them if this process is
        # killed. It imports no package, and so begins at once.
        program = "import contextlib, os, shutil, signal, sys, time\n"
        program += inspect.getsource(_send) + inspect.getsource(_guard)
        program += "_guard(float(sys.argv[1]), sys.argv[2])"
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, str(grace), folder],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Signals of the terminal are not for it.
            start_new_session=True,
        )
        self._passed_on = 0
        # The first signal to end them, and when they are killed after it.
        self.asked: int | None = None
        self._until = math.inf

    def __enter__(self) -> "_Run":
        """Keep signals to this process for the others, until they are sent on."""

        def receive(number: int, frame: object) -> None:
            self.received.append(number)
            if number in _ENDING and self.asked is None:
                self.asked, self._until = number, time.monotonic() + self._grace

        self._before = {number: signal.signal(number, receive) for number in _PASSED_ON}
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes that still run, and what they have started; write what they wrote."""
        if self.asked is None:
            for process in self._processes:
                if process.poll() is None:
                    _send(process.pid, signal.SIGTERM)
        self._wait_for(self._processes, self._grace)
        for process in self._processes:
            _send(process.pid, signal.SIGKILL)
            process.wait()
        self._guard.kill()
        self._guard.communicate()
        if self.failure is not None:
            steps = _behind(STANDS, told_launcher(self._verdicts))
            known = [int(each) for each in steps if each.isdecimal()]
            self.failure.steps = max(known, default=None)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        until = time.monotonic() + _DRAIN_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        self._lines.put(None)
        self._writer.join()

    def start(self, command: Sequence[str], environment: dict[str, str], prefix: str) -> None:
        """Start a process, or take one that waits; its lines are written with a prefix."""
        environment = {**environment, VERDICTS: self._verdicts}
        try:
            process = self._waiting.take(environment) or _started(
                command, environment, subprocess.DEVNULL
            )
        except OSError as error:
            raise ArgumentError(
                f"{command[0]!r:.100} cannot be started: {error.strerror or error}."
            ) from None
        self._processes.append(process)
        self._tell_guard(process.pid)
        for pipe, to in ((process.stdout, self._stdout), (process.stderr, self._stderr)):
            given = pipe, prefix.encode(), to
            self._readers.append(threading.Thread(target=self._read, args=given, daemon=True))
            self._readers[-1].start()

    def _tell_guard(self, group: int) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.write(f"{group}\n".encode())

    def _read(self, pipe: IO[bytes], prefix: bytes, to: IO[bytes]) -> None:
        for line in pipe:
            self._lines.put((to, prefix + line.removesuffix(b"\n") + b"\n"))

    def _write(self) -> None:
        while (item := self._lines.get()) is not None:
            to, line = item
            try:
                to.write(line)
                to.flush()
            except OSError:
                # Nobody reads it any more; the processes go on. What is left of the line would be
                # written again with the next one, and when Python ends.
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), to.fileno())

    def wait(self, number: int) -> tuple[int, int | None]:
        """Wait until so many processes have ended well, one has not, or their time is over.

        Returns the exit code, and which process failed first, as far as known.
        """
        left = dict(enumerate(self._processes))
        while left and time.monotonic() < self._until:
            self._pass_on()
            self._look()
            for own, process in list(left.items()):
                if process.poll() is not None:
                    del left[own]
                if process.returncode:
                    return self._of_failure(own, process.returncode, left)
            ended = [own for own in range(len(self._processes)) if own not in left]
            if ended and left and not self.received:
                # Those that connect wait for all, and come to their ends together.
                told = told_launcher(self._verdicts)
                connected = {who for who, what in told if what == CONNECTS}
                absent = [own for own in ended if connected and str(own) not in connected]
                if absent:
                    verdict = left_before("initialize", absent[0])
                    return self._ended(verdict.code, absent[0], verdict.sentence)
            time.sleep(_EVERY)
        if not left and len(self._processes) == number:
            return 0, None
        assert self.asked is not None
        if left:
            late = f"{signal.Signals(self.asked).name}: process {' '.join(map(str, left))}"
            self._say(f"killed {self._grace:g} seconds after {late}")
        return 128 + self.asked, None

    def _of_failure(
        self, own: int, code: int, left: dict[int, subprocess.Popen[bytes]]
    ) -> tuple[int, int | None]:
        """Return how a run ends in which a process has failed, perhaps because of another one."""
        if code in _BECAUSE_OF_ANOTHER or any(who == str(own) for who, _ in self._told()):
            self._wait_for(left.values(), _LEAVING_SECONDS)
            # What process 0 says, which judges, or else what the first one says.
            said = sorted(self._told(), key=lambda words: words[0] != "0")
            if not said:
                return self._ended(code, None, f"process {own} ended with code {code}")
            verdict = said[0][1]
            # They may see a death before the launcher can ask for its code.
            own, its = verdict.process, self._processes[verdict.process].returncode
            if verdict.kind is Kind.SILENT:
                # It is stopped, or does not run Python, and saves nothing.
                _send(self._processes[own].pid, signal.SIGKILL)
            if not its or its in _BECAUSE_OF_ANOTHER:
                return self._ended(its or code, own, verdict.sentence)
            code = its
        how = f"with code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
        return self._ended(code if code > 0 else 128 - code, own, f"process {own} ended {how}")

    def _ended(self, code: int, failed: int | None, sentence: str) -> tuple[int, int | None]:
        # The first sentence of a verdict says enough.
        sentence = sentence.partition(". ")[0].rstrip(".")
        self.failure = _Failure(sentence, time.monotonic())
        # After Ctrl-C everybody knows why.
        if len(self._processes) > 1 and not self.received:
            self._say(f"{sentence}; the others are ended")
        return code, failed

    def _look(self) -> None:
        """Once process 0 trains, start spares, and say what the end of the last run has cost."""
        if self._has_begun or time.monotonic() < self._looked + 0.2:
            return
        self._looked = time.monotonic()
        told = [(who, what) for who, what in told_launcher(self._verdicts) if who == "0"]
        if ("0", RUNS) not in told:
            return
        self._has_begun = True
        if self._before_it is not None:
            self._say(self._before_it.told(next(reversed(_behind(RESTORED, told)), None)))
        self._waiting.fill()
        # Each run has a guard of its own. Spares end by themselves, but not what they have started.
        for group in self._waiting.groups():
            self._tell_guard(group)

    def _say(self, what: str) -> None:
        self._lines.put((self._stderr, f"crossshard: {what}.\n".encode()))

    def _told(self) -> list[tuple[str, Verdict]]:
        """Return why processes leave, as they themselves say it."""
        told = ((who, Verdict.parse(what)) for who, what in told_launcher(self._verdicts))
        return [(who, v) for who, v in told if v and v.process < len(self._processes)]

    def _wait_for(self, processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
        """Wait until these processes have ended, or their time is over."""
        until = min(self._until, time.monotonic() + seconds)
        while time.monotonic() < until and any(each.poll() is None for each in processes):
            self._pass_on()
            time.sleep(_EVERY)

    def _pass_on(self) -> None:
        """Send what has been received to all processes.

        Not from the handler of the signal, which may run while a process is being started.
        """
        while self._passed_on < len(self.received):
            number = self.received[self._passed_on]
            self._passed_on += 1
            for process in self._processes:
                _send(process.pid, number)


def _behind(word: str, told: Iterable[tuple[str, str]]) -> list[str]:
    """Return what processes have told their launcher behind a word."""
    texts = (what.partition(" ") for _, what in told)
    return [text for first, _, text in texts if first == word]


def _send(group: int, number: int) -> bool:
    """Send a signal to a process group, and return whether it is there.

    It may outlive the process that led it.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


def _guard(grace: float, folder: str) -> None:
    """End the groups that standard input names, and remove a folder, once the launcher is killed.

    Then the pipe closes. A launcher that has ended its processes itself ends this program before.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = list(map(int, sys.stdin))
    left = [group for group in groups if _send(group, signal.SIGTERM)]
    until = time.monotonic() + grace
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = [group for group in left if _send(group, 0)]
    # Until none of them writes any more, or what is left of them is there for nobody to collect.
    until = time.monotonic() + 1
    while left and time.monotonic() < until:
        left = [group for group in left if _send(group, signal.SIGKILL)]
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
