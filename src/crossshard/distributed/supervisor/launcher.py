"""Launcher: starts the processes of a job on this machine, and ends them together."""

import contextlib
import dataclasses
import math
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from crossshard.distributed.job import (
    ADDRESS,
    CONNECTS,
    DEVICES,
    LOOPBACK,
    NUMBER,
    OWN,
    VERDICTS,
    check_unused,
    told_launcher,
)
from crossshard.distributed.supervisor import guard
from crossshard.distributed.supervisor.judge import (
    PROCESS_LOST,
    PROCESS_STALLED,
    Kind,
    Verdict,
    left_before,
)
from crossshard.errors import ArgumentError

# How long a process may take to end after a signal, to save a checkpoint; as Slurm and Kubernetes.
GRACE_SECONDS = 30.0
# How long to read what a process wrote after it ended, if one that it started keeps its pipe.
_DRAIN_SECONDS = 1.0
# How long processes that leave because of another one wait for each other, at most.
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
_OTHERS = "the others are ended"


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a job ended."""

    code: int
    failed: int | None = None  # which process failed first, as far as known
    why: str = ""  # what there is to say of it


def most_processes() -> tuple[int, str]:
    """How many processes one launcher can have on this machine, and why not more."""
    of_user = lambda kind: resource.getrlimit(kind)[0]
    # Two pipes, which two threads of the launcher read; the launcher has files of its own.
    bounds = [
        (of_user(resource.RLIMIT_NOFILE), 16, 2, "files may be open, two of each (ulimit -n)"),
        (of_user(resource.RLIMIT_NPROC), 0, 3, "threads may run, three of each (ulimit -u)"),
    ]
    for name in ("pid_max", "threads-max"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path("/proc/sys/kernel", name).read_text())
            bounds.append((limit, 0, 3, f"threads may run, three of each (kernel.{name})"))
    # A negative number is none.
    return min(
        (max(0, limit - own) // each, f"{limit} {what}")
        for limit, own, each, what in bounds
        if limit >= 0
    )


def free_port(host: str) -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def launch(
    command: Sequence[str],
    slots: Sequence[int],
    *,
    stdout: IO[bytes],
    stderr: IO[bytes],
    cpu_devices: int | None = None,
    port: int | None = None,
    grace: float = GRACE_SECONDS,
) -> tuple[Ending, bool]:
    """Run a command in several processes.

    Each line that a process writes is written with the number of the process before it. Signals go
    to all processes, which are killed if they have not ended in time. When one fails, the others
    are ended; the code is that of the first that failed, 128 plus the number of a signal as in
    shells, and 0 if none did. They end with the launcher, too, if that is killed. Returns how it
    ended, and whether the launcher has received a signal.

    Args:
      command: the program and its arguments.
      slots: for each process which GPU it has, if ``cpu_devices`` is ``None``.
      stdout, stderr: where their standard output and error go.
      cpu_devices: how many virtual CPU devices each of them has; ``None`` for one GPU each, or what
        else JAX finds.
      port: the port at which they meet; any free one if ``None``.
      grace: how many seconds processes have to end, after a signal or a failure.
    """
    number = len(slots)
    if port is not None:
        check_unused(LOOPBACK, port)
    of_job = {
        ADDRESS: f"{LOOPBACK}:{port or free_port(LOOPBACK)}",
        NUMBER: str(number),
        "PYTHONUNBUFFERED": "1",
    }
    if cpu_devices is not None:
        of_job |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cpu_devices)}
        # Enough threads that collectives of virtual devices never deadlock.
        of_job["NPROC"] = str(4 * cpu_devices)
        of_job["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", TUNABLES)
    lines: queue.SimpleQueue[tuple[IO[bytes], bytes] | None] = queue.SimpleQueue()
    writer = threading.Thread(target=_write, args=(lines,), daemon=True)
    readers: list[threading.Thread] = []
    with _guarded(grace) as (tell, verdicts):
        family = _Family(grace, verdicts)
        with family.takes_signals():
            try:
                for own, slot in enumerate(slots):
                    if family.must_end:
                        break
                    environment = {**os.environ, **of_job, OWN: str(own), VERDICTS: str(verdicts)}
                    if cpu_devices is None:
                        # One GPU each, as under Slurm and Open MPI.
                        environment[DEVICES] = str(slot)
                    process = _start(command, environment)
                    family.processes.append(process)
                    tell("+", process)
                    prefix = f"[{own:>{len(str(number - 1))}}] ".encode()
                    for pipe, to in ((process.stdout, stdout), (process.stderr, stderr)):
                        given = pipe, prefix, lines, to
                        readers.append(threading.Thread(target=_read, args=given, daemon=True))
                        readers[-1].start()
                writer.start()
                ending = family.wait(number)
                if ending.why:
                    lines.put((stderr, f"crossshard: {ending.why}.\n".encode()))
            finally:
                family.end()
                for process in family.processes:
                    tell("-", process)
    until = time.monotonic() + _DRAIN_SECONDS
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
    lines.put(None)
    writer.join()
    return ending, bool(family.received)


def launch_again(
    command: Sequence[str],
    number: int,
    restarts: int,
    min_processes: int | None,
    *,
    stderr: IO[bytes],
    **options: Any,
) -> int:
    """Run a command as ``launch`` does, again after each failure; the exit code of the last run.

    A run that a signal to the launcher has ended is not started again.

    Args:
      command: the program and its arguments.
      number: how many processes.
      restarts: how often to start it again, at most.
      min_processes: leave out the process that has failed, and its GPU, while so many are left;
        ``None`` to start as many again.
      stderr: where a line goes for each start.
      options: those of ``launch``.
    """
    slots = list(range(number))
    for left in range(restarts, -1, -1):
        ending, interrupted = launch(command, slots, stderr=stderr, **options)
        if ending.code == 0 or interrupted or left == 0:
            break
        may_drop = min_processes is not None and len(slots) > min_processes
        if may_drop and ending.failed is not None:
            del slots[ending.failed]
        many = f"{len(slots)} process{'es' * (len(slots) > 1)}"
        times = f"{left - 1} more restart{'s' * (left != 2)}"
        stderr.write(f"crossshard: started again with {many}; {times} left.\n".encode())
        stderr.flush()
    return ending.code


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A group of its own, so that what it has started ends with it.
            start_new_session=True,
        )
    except OSError as error:
        raise ArgumentError(
            f"{command[0]!r:.100} cannot be started: {error.strerror or error}."
        ) from None


def _read(pipe: IO[bytes], prefix: bytes, lines: Any, to: IO[bytes]) -> None:
    # One writer writes whole lines, so that those of two processes never mix.
    for line in pipe:
        lines.put((to, prefix + line if line.endswith(b"\n") else prefix + line + b"\n"))


def _write(lines: Any) -> None:
    while (item := lines.get()) is not None:
        to, line = item
        try:
            to.write(line)
            to.flush()
        except OSError:
            # Nobody reads it any more; the processes go on. What is left of the line would be
            # written again with the next one, and when Python ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, to.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def _guarded(grace: float) -> Iterator[tuple[Any, Path]]:
    """Start a program that ends processes if this one is killed.

    Yields a function that tells it of each, and a file, which it removes at the end.
    """
    number, file = tempfile.mkstemp(prefix="crossshard-")
    os.close(number)
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(grace), file],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Signals of the terminal are not for it.
        start_new_session=True,
    )

    def tell(sign: str, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):
            os.write(watching.stdin.fileno(), f"{sign}{process.pid}\n".encode())  # type: ignore[union-attr]

    try:
        yield tell, Path(file)
    finally:
        watching.communicate()


class _Family:
    """The processes of a launcher, which get its signals and end together."""

    def __init__(self, grace: float, verdicts: Path) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received: list[int] = []
        self._grace = grace
        self._verdicts = verdicts
        self._passed_on = 0
        self._until = math.inf

    @property
    def must_end(self) -> bool:
        """Whether a signal has come that ends them."""
        return self._until < math.inf

    @contextlib.contextmanager
    def takes_signals(self) -> Iterator[None]:
        """Keep signals to this process for the others, until ``pass_on`` sends them."""

        def receive(number: int, frame: object) -> None:
            self.received.append(number)
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
        while self._passed_on < len(self.received):
            number = self.received[self._passed_on]
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
                    is_news = number > 1 and not self.received
                    return ending if is_news else dataclasses.replace(ending, why="")
            if left and not self.received:
                absent = self._absent({*range(len(self.processes))} - left.keys())
                if absent is not None:
                    return absent
            time.sleep(_EVERY)
        if not left and len(self.processes) == number:
            return Ending(0)
        asked = next(each for each in self.received if each in _ENDING)
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
        if code in _BECAUSE_OF_ANOTHER or any(
            who == str(own) for who, _ in self._verdicts_of_all()
        ):
            self._wait_for(left.values(), _LEAVING_SECONDS)
            # What process 0 says, which judges, or else what the first says.
            said = sorted(self._verdicts_of_all(), key=lambda words: words[0] != "0")
            if not said:
                return Ending(code, None, f"process {own} ended with code {code}; {_OTHERS}")
            verdict = said[0][1]
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

    def _verdicts_of_all(self) -> list[tuple[str, Verdict]]:
        """Why they leave, as they themselves say it."""
        told = ((who, Verdict.parse(what)) for who, what in told_launcher(self._verdicts))
        return [(who, v) for who, v in told if v and v.process < len(self.processes)]

    def _absent(self, ended: set[int]) -> Ending | None:
        """The ending of a job if one of those that ended well is waited for by those that connect.

        Those that connect wait for all, and come to their ends together.
        """
        told = told_launcher(self._verdicts) if ended else []
        connected = {who for who, what in told if what == CONNECTS}
        absent = next((each for each in sorted(ended) if str(each) not in connected), None)
        if not connected or absent is None:
            return None
        verdict = left_before("initialize", absent)
        return Ending(verdict.code, absent, f"{_in_short(verdict)}; {_OTHERS}")


def _in_short(verdict: Verdict) -> str:
    return verdict.sentence.partition(". ")[0].rstrip(".")


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    # The group may outlive the process that led it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
