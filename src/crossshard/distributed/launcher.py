"""Launcher: starts the processes of a job on this machine, and ends them together."""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from crossshard.distributed import guard
from crossshard.distributed.addresses import free_port
from crossshard.distributed.exit_codes import PROCESS_LOST, PROCESS_STALLED
from crossshard.distributed.job import ADDRESS, DEVICES, LOOPBACK, NUMBER, OWN
from crossshard.errors import ArgumentError

# How long a process may take to end after SIGTERM, to write what it must.
GRACE_SECONDS = 10.0
# How long to read what a process wrote after it ended, if one that it started keeps its pipe.
_DRAIN_SECONDS = 1.0
# How long processes that leave because of another one wait for each other, at most.
_LEAVING_SECONDS = 5.0
_PASSED_ON = tuple(
    getattr(signal, f"SIG{name}") for name in ("INT", "QUIT", "TERM", "HUP", "USR1", "USR2")
)


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
      code: its exit code.
      failed: which of its processes failed first; ``None`` if none did.
      interrupted: whether the launcher has received a signal.
    """

    code: int
    failed: int | None = None
    interrupted: bool = False


def launch(
    command: Sequence[str],
    slots: Sequence[int],
    *,
    stdout: IO[bytes],
    stderr: IO[bytes],
    cpu_devices: int | None = None,
    port: int | None = None,
    grace: float = GRACE_SECONDS,
) -> Ending:
    """Run a command in several processes.

    Each line that a process writes is written with the number of the process before it. Signals go
    to all processes. When one fails, the others are ended; the code is that of the first that
    failed, 128 plus the number of a signal as in shells, and 0 if none did. They end with the
    launcher, too, if that is killed.

    Args:
      command: the program and its arguments.
      slots: for each process which GPU it has, if ``cpu_devices`` is ``None``.
      stdout: where their standard output goes.
      stderr: where their standard error goes.
      cpu_devices: how many virtual CPU devices each of them has; ``None`` for one GPU each, or what
        else JAX finds.
      port: the port at which they meet; any free one if ``None``.
      grace: how many seconds processes have to end before they are killed.

    Raises:
      ArgumentError: the command cannot be started.
    """
    number = len(slots)
    address = f"{LOOPBACK}:{port or free_port(LOOPBACK)}"
    lines: queue.SimpleQueue[tuple[IO[bytes], bytes] | None] = queue.SimpleQueue()
    writer = threading.Thread(target=_write, args=(lines,), daemon=True)
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    with _guarded(grace) as guarded, _signals_go_to(processes) as received:
        try:
            for own, slot in enumerate(slots):
                gpu = slot if cpu_devices is None else None
                processes.append(_start(command, number, own, address, gpu, cpu_devices))
                guarded("+", processes[-1])
                readers += _readers(processes[-1], own, number, lines, stdout, stderr)
            writer.start()
            code, failed, why = _wait(processes)
            # After Ctrl-C everybody knows why.
            if why and number > 1 and not received:
                lines.put((stderr, f"crossshard: {why}; the others are ended.\n".encode()))
        finally:
            _end(processes, grace)
            for process in processes:
                guarded("-", process)
    until = time.monotonic() + _DRAIN_SECONDS
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
    lines.put(None)
    writer.join()
    return Ending(code, failed, bool(received))


def _start(
    command: Sequence[str],
    number: int,
    own: int,
    address: str,
    gpu: int | None,
    cpu_devices: int | None,
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        ADDRESS: address,
        NUMBER: str(number),
        OWN: str(own),
        "PYTHONUNBUFFERED": "1",
    }
    if gpu is not None:
        # One each, as under Slurm and Open MPI.
        environment[DEVICES] = str(gpu)
    if cpu_devices is not None:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cpu_devices)}
        # Enough threads that collectives of virtual devices never deadlock.
        environment["NPROC"] = str(4 * cpu_devices)
        # XLA takes fresh memory for each step: in pages of 4 KiB, that can take a fifth of it.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
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


def _readers(
    process: subprocess.Popen[bytes],
    own: int,
    number: int,
    lines: Any,
    stdout: IO[bytes],
    stderr: IO[bytes],
) -> list[threading.Thread]:
    prefix = f"[{own:>{len(str(number - 1))}}] ".encode()
    pipes = ((process.stdout, stdout), (process.stderr, stderr))
    threads = [
        threading.Thread(target=_read, args=(pipe, prefix, lines, to), daemon=True)
        for pipe, to in pipes
    ]
    for thread in threads:
        thread.start()
    return threads


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
def _signals_go_to(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals on to all processes; the list of those that were received."""
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        for process in processes:
            _send(process, number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int | None, str]:
    """Wait until all processes have ended well, or one has not: the code, who failed, and how."""
    left = dict(enumerate(processes))
    while left:
        for own, process in list(left.items()):
            code = process.poll()
            if code is None:
                continue
            del left[own]
            if code:
                failed: int | None = own
                if code in _BECAUSE_OF_ANOTHER:
                    failed = _who_was_waited_for(left)
                    # They may see a death before this process can ask for its code.
                    if failed is not None and left[failed].returncode:
                        own, code = failed, left[failed].returncode
                how = f"with code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
                return (code if code > 0 else 128 - code), failed, f"process {own} ended {how}"
        time.sleep(0.02)
    return 0, None, ""


_BECAUSE_OF_ANOTHER = (PROCESS_LOST, PROCESS_STALLED)


def _who_was_waited_for(left: dict[int, subprocess.Popen[bytes]]) -> int | None:
    """The process because of which the others leave: it does not, or with another code."""
    until = time.monotonic() + _LEAVING_SECONDS
    while time.monotonic() < until and any(each.poll() is None for each in left.values()):
        time.sleep(0.02)
    codes = {own: process.poll() for own, process in left.items()}
    return next((own for own, code in codes.items() if code not in _BECAUSE_OF_ANOTHER), None)


@contextlib.contextmanager
def _guarded(grace: float) -> Iterator[Any]:
    """Start a program that ends processes if this one is killed; a function tells it of each."""
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(grace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Signals of the terminal are not for it.
        start_new_session=True,
    )

    def tell(sign: str, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):
            os.write(watching.stdin.fileno(), f"{sign}{process.pid}\n".encode())  # type: ignore[union-attr]

    try:
        yield tell
    finally:
        watching.communicate()


def _end(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """End all processes that still run, and what they have started."""
    for process in processes:
        if process.poll() is None:
            _send(process, signal.SIGTERM)
    until = time.monotonic() + grace
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        _send(process, signal.SIGKILL)
        process.wait()


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    # The group may outlive the process that led it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
