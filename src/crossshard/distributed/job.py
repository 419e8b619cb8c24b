"""Job: how many processes train together, which of them this is, and where they meet."""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import re
import socket
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

    A cluster's own service may take so many seconds to answer.
    """
    job = _of_variables(environ) or _of_open_mpi_5(environ) or _of_jax(seconds, environ)
    # Of another launcher, such as torchrun, MPICH or Open MPI, each process would train alone.
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if job is None else ():
        if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
            raise ArgumentError(
                f"{name}={environ[name]} says that there are several processes, but not where they "
                f"meet. Pass coordinator_address, num_processes and process_id, or set {ADDRESS}, "
                f"{NUMBER} and {OWN}."
            )
    return job or Job()


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
    # In the upper end of the ephemeral range, and the same in all processes of a job.
    port = environ.get("JAX_COORDINATOR_PORT") or 61440 + int(pid) % 4096
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


# Where the coordinator of a job listens. Whoever reaches it can end the job.

# Every interface of the machine, in words.
ALL_INTERFACES = "all interfaces"


def bind_address(coordinator_address: str, bind: str | None) -> str:
    """Where process 0 listens: at the interface that the address names, unless told otherwise.

    Args:
      coordinator_address: ``host:port``, which the other processes call.
      bind: the address of another interface, or ``"all interfaces"``.
    """
    host, port = split_address(coordinator_address)
    if bind == ALL_INTERFACES:
        return f"[::]:{port}"
    host = host if bind is None else bind
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ArgumentError(
            f"The host {host!r:.100} is not known here: {error.strerror or error}."
        ) from None
    if bind is not None and ipaddress.ip_address(found).is_unspecified:
        raise ArgumentError(
            f"bind={bind!r} listens on every interface of this machine, to anyone who reaches it. "
            f"If that is meant, write bind={ALL_INTERFACES!r}."
        )
    if _trial(found, 0) is not None:
        raise ArgumentError(
            f"{found}, for {bind or host!r}, is not the address of an interface of this machine, "
            f"so process 0 cannot listen there. Pass bind= with the address of one, or "
            f"bind={ALL_INTERFACES!r}."
        )
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of ``host:port`` or ``[IPv6]:port``."""
    parts = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\[\]\s]+)):(\d{1,5})", address)
    if parts is None or not 0 < int(parts[3]) < 65536:
        raise ArgumentError(
            f"coordinator_address must be host:port, as 10.0.0.1:1234 or [fe80::1]:1234; got "
            f"{address!r:.100}."
        )
    return parts[1] or parts[2], int(parts[3])


def check_unused(host: str, port: int) -> None:
    """Raise if something listens at a port of this machine.

    A second coordinator could listen there, too, and the processes of two jobs would meet at the
    wrong one.
    """
    error = _trial(host, port)
    if error is not None and error.errno == errno.EADDRINUSE:
        raise ArgumentError(
            f"Something listens at port {port} of {host} already, perhaps another job. Name "
            f"another port, or none."
        )


def _trial(host: str, port: int) -> OSError | None:
    """Why this process could not listen there; ``None`` if it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # The connections of a job that has ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def answers(address: str) -> bool:
    """Whether something listens at ``host:port``."""
    try:
        socket.create_connection(split_address(address), timeout=1).close()
    except OSError:
        return False
    return True
