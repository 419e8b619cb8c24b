"""Job: how many processes train together, which of them this is, and where they meet."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from crossshard import _jax
from crossshard.errors import ArgumentError

# What `crossshard launch` sets. JAX itself reads the first and the last.
ADDRESS, NUMBER, OWN = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"
# The file in which processes tell their launcher that they connect, and why they leave.
VERDICTS = "CROSSSHARD_VERDICTS"

# What they write there before they wait for each other to connect.
CONNECTS = "connects"

LOOPBACK = "127.0.0.1"

# On CPUs XLA takes and frees memory in each step. So glibc keeps it, in large pages of one heap for
# all threads, instead of handing it back to Linux.
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:"
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
)


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together.

    Attributes:
      num_processes: how many there are.
      process_id: which of them this is, from 0.
      coordinator_address: where they meet, ``host:port``, at process 0; ``None`` for one process.
      local_device_ids: the devices of this process; ``None`` for all that it finds.
      found_in: what said so, such as ``"Slurm"``.
    """

    num_processes: int = 1
    process_id: int = 0
    coordinator_address: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    found_in: str = "nothing"


def find_job(seconds: float, environ: Mapping[str, str] = os.environ) -> Job:
    """The job that the environment describes; one process if it describes none.

    Args:
      seconds: how long a cluster's own service may take to answer.
      environ: the environment variables.

    Raises:
      ArgumentError: a variable is missing or is not a number, or a launcher started several
        processes and does not say where they meet.
    """
    job = _of_variables(environ) or _of_open_mpi_5(environ) or _of_jax(seconds, environ)
    if job is None:
        _refuse_unknown_launcher(environ)
        return Job()
    return job


def tell_launcher(process: int, what: str) -> None:
    """Write a line for ``crossshard launch``, if that has started this process."""
    with contextlib.suppress(KeyError, OSError):
        file = os.open(os.environ[VERDICTS], os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{process} {what}\n".encode())
        os.close(file)


def told_launcher(file: Path) -> list[tuple[str, str]]:
    """What processes have told their launcher: the number of each, and its text."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [(who, what) for who, _, what in (line.partition(" ") for line in lines)]


def _of_variables(environ: Mapping[str, str]) -> Job | None:
    given = [name for name in (NUMBER, OWN) if environ.get(name)]
    if not given:
        return None
    missing = [name for name in (ADDRESS, NUMBER, OWN) if not environ.get(name)]
    if missing:
        raise ArgumentError(
            f"{' and '.join(given)} is set, but {' and '.join(missing)} is not. Set all of "
            f"{ADDRESS}, {NUMBER} and {OWN}, or none."
        )
    number, own = (_number(environ, name) for name in (NUMBER, OWN))
    return Job(number, own, environ[ADDRESS], _devices(environ), "environment variables")


def _of_open_mpi_5(environ: Mapping[str, str]) -> Job | None:
    # Open MPI 4 sets OMPI_MCA_orte_hnp_uri, which JAX reads. From 5 on the name of the job has the
    # host and the process id of mpirun: prterun-HOST-PID@1.
    started = re.fullmatch(r"prterun-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", ""))
    if started is None or "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    host, pid = started.groups()
    port = environ.get("JAX_COORDINATOR_PORT") or str(_port_from(int(pid)))
    number = _number(environ, "OMPI_COMM_WORLD_SIZE")
    on_this_host = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Job(
        number,
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        environ.get(ADDRESS) or f"{LOOPBACK if on_this_host == number else host}:{port}",
        # As JAX does it under Open MPI 4.
        _devices(environ) or (_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),),
        "Open MPI 5",
    )


def _of_jax(seconds: float, environ: Mapping[str, str]) -> Job | None:
    found = _jax.detected_job(seconds)
    if found is None:
        return None
    name, address, number, own, devices = found
    on_this_host = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or (
        environ.get("SLURM_NTASKS") if environ.get("SLURM_STEP_NUM_NODES") == "1" else None
    )
    if on_this_host == str(number) and not environ.get(ADDRESS):
        address = f"{LOOPBACK}:{address.rpartition(':')[2]}"
    return Job(number, own, address, devices, name)


def _refuse_unknown_launcher(environ: Mapping[str, str]) -> None:
    """Raise if a launcher that is not known here started several processes.

    Each of them would train alone.
    """
    for name in _SIZES:
        if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
            raise ArgumentError(
                f"{name}={environ[name]} says that there are several processes, but not where they "
                f"meet. Pass coordinator_address, num_processes and process_id, or set {ADDRESS}, "
                f"{NUMBER} and {OWN}."
            )


# How many processes there are, as other launchers say it: torchrun, MPICH, Open MPI.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def _port_from(number: int) -> int:
    """A port of the upper end of the ephemeral range, the same in all processes of a job."""
    return 61440 + number % 4096


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ.get(name, "").isdecimal():
        raise ArgumentError(f"{name} must be a number from 0; got {environ.get(name)!r:.60}.")
    return int(environ[name])


def _devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    given = environ.get(DEVICES)
    if not given:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise ArgumentError(
            f"{DEVICES} must be numbers with commas between them; got {given!r:.60}."
        )
    return tuple(map(int, given.split(",")))
