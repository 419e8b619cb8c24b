"""Launcher: starts the processes of a job on this machine, ends them, and starts them again."""

import contextlib
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from crossshard.distributed.addresses import check_unused, free_port
from crossshard.distributed.job import ADDRESS, DEVICES, LOOPBACK, NUMBER, OWN, TUNABLES, VERDICTS
from crossshard.distributed.supervisor import guard
from crossshard.distributed.supervisor.endings import Ending, Family
from crossshard.errors import ArgumentError

# How long a process may take to end after a signal, to save a checkpoint; as Slurm and Kubernetes.
GRACE_SECONDS = 30.0
# How long to read what a process wrote after it ended, if one that it started keeps its pipe.
_DRAIN_SECONDS = 1.0


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
      stdout: where their standard output goes.
      stderr: where their standard error goes.
      cpu_devices: how many virtual CPU devices each of them has; ``None`` for one GPU each, or what
        else JAX finds.
      port: the port at which they meet; any free one if ``None``.
      grace: how many seconds processes have to end, after a signal or a failure.

    Raises:
      ArgumentError: the command cannot be started, or something listens at the port.
    """
    number = len(slots)
    if port is not None:
        check_unused(LOOPBACK, port)
    address = f"{LOOPBACK}:{port or free_port(LOOPBACK)}"
    lines: queue.SimpleQueue[tuple[IO[bytes], bytes] | None] = queue.SimpleQueue()
    writer = threading.Thread(target=_write, args=(lines,), daemon=True)
    readers: list[threading.Thread] = []
    with _guarded(grace) as (tell, verdicts):
        family = Family(grace, verdicts)
        with family.takes_signals():
            try:
                for own, slot in enumerate(slots):
                    if family.must_end:
                        break
                    gpu = slot if cpu_devices is None else None
                    environment = _environment(number, own, address, gpu, cpu_devices)
                    process = _start(command, environment | {VERDICTS: str(verdicts)})
                    family.processes.append(process)
                    tell("+", process)
                    readers += _readers(process, own, number, lines, stdout, stderr)
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
    return ending, family.interrupted


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

    Raises:
      ArgumentError: the command cannot be started.
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


def _environment(
    number: int, own: int, address: str, gpu: int | None, cpu_devices: int | None
) -> dict[str, str]:
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
        environment.setdefault("GLIBC_TUNABLES", TUNABLES)
    return environment


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
