"""Job: finds the processes that train together, and connects this one with the others."""

import dataclasses
import errno
import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from os import environ

import jax

from crossshard import _check, _jax
from crossshard.distributed.judge import Kind, Timeouts, Verdict, check_seconds
from crossshard.distributed.watch import (
    CONNECTS,
    PROGRESS,
    Watch,
    answers,
    tell_launcher,
    told_launcher,
    watch_alone,
)
from crossshard.errors import ArgumentError, ArgumentTypeError, DistributedError

# What `crossshard launch` sets. JAX itself reads the first and the last.
ADDRESS, NUMBER, OWN = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"
# Set in a process that waits until the launcher needs it.
SPARE = "CROSSSHARD_SPARE"
LOOPBACK = "127.0.0.1"
# `bind` for every interface of the machine.
ALL_INTERFACES = "all interfaces"
# Then JAX aborts the process, and does not say which one it waits for; the watch does, before.
_JAX_HEARTBEAT_SECONDS = 10**6
_STALL_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together.

    Attributes:
      num_processes: how many there are.
      process_id: which of them this is, from 0.
      coordinator_address: where they meet, ``host:port``, at process 0; ``None`` for one process.
      local_device_ids: the devices of this process; ``None`` for all that it finds.
      found_in: where it was found, such as ``"slurm"``.
    """

    num_processes: int = 1
    process_id: int = 0
    coordinator_address: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    found_in: str = "nothing"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: tuple[int, ...] | None = None,
    bind: str | None = None,
    timeout: float = 300,
    stall_timeout: float | Mapping[str, float] = _STALL_SECONDS,
) -> Job:
    """Connect this process with the others of its job, before the first JAX operation.

    Without arguments it finds the job: from ``crossshard launch`` or its environment variables, a
    worker of Ray Train, Open MPI 5, and what JAX knows, which are Slurm, Open MPI 4, Kubernetes and
    TPU pods. If there is none, the process works alone, so that one script runs with a launcher and
    without. Where JAX is connected already, as by Ray's ``JaxTrainer``, it watches that job.

    Process 0 listens only at the interface that ``coordinator_address`` names, where JAX listens
    at all of them: anyone who reaches the coordinator can end the job.

    Args:
      coordinator_address: ``host:port``, where process 0 listens and the others call.
      num_processes: how many processes there are.
      process_id: which of them this is, from 0.
      local_device_ids: the accelerators of this process; by default those that the launcher names,
        else all of its host.
      bind: the address of another interface at which process 0 listens, as behind a service of
        Kubernetes; ``"all interfaces"`` for all of them.
      timeout: how many seconds to wait for the others.
      stall_timeout: how many seconds a process may stand still while others wait for it, in a step,
        ``init``, ``save`` or any other call that all of them make; then all leave, with the exit
        code ``PROCESS_STALLED``, their stacks and a line that names it. When one dies, fails or
        leaves, the others leave within seconds, with ``PROCESS_LOST``. Pass numbers by name if they
        differ, as in ``{"start": 900, "step": 60, "save": 300, "alone": 600}``: ``"start"`` holds
        until the first step is entered, ``"step"`` in steps and all else, and other names are those
        of calls, or passed to ``entering``. With ``"alone"`` a job of one process is watched, too:
        it leaves if it enters nothing for so long after a step. ``"compile"`` has 600 and
        ``"lock"`` 60, unless you name them.

    Returns:
      The job that it found.

    Raises:
      ArgumentError: only a part of the job is described, or process 0 cannot listen there, or
        something else does.
      ArgumentTypeError: an argument has a wrong type.
      DistributedError: JAX is running already, or the others did not come in time; JAX is connected
        already, and an argument says where.

    >>> initialize().num_processes
    1
    """
    if not isinstance(local_device_ids, tuple | list | None):
        raise ArgumentTypeError(
            f"local_device_ids must be a tuple of ints; got {_check.described(local_device_ids)}."
        )
    for each in local_device_ids or ():
        _check.whole_number("Each of local_device_ids", each, least=0)
    for name, text in (("coordinator_address", coordinator_address), ("bind", bind)):
        if text is not None:
            _check.word(name, text)
    for name, number in (("num_processes", num_processes), ("process_id", process_id)):
        if number is not None:
            _check.whole_number(name, number, least=None)
    check_seconds("timeout", timeout)
    timeouts = Timeouts.read(stall_timeout, _STALL_SECONDS)
    _wait_as_spare()
    connected = _jax.has_coordinator()
    if connected and PROGRESS.seconds is not None:
        raise DistributedError("initialize is called once in a process; this is the second time.")
    given = (coordinator_address, num_processes, process_id, local_device_ids, bind)
    if connected and any(each is not None for each in given):
        raise DistributedError(
            "JAX is connected already, by Ray's JaxTrainer or jax.distributed.initialize. Call "
            "initialize without coordinator_address, num_processes, process_id, local_device_ids "
            "and bind to watch that job, or call it alone to connect."
        )
    match coordinator_address, num_processes, process_id:
        case None, None, None:
            job = find_job(timeout)
        case str(), int(), int():
            job = Job(num_processes, process_id, coordinator_address, None, "the arguments")
        case _:
            raise ArgumentError(
                f"Pass coordinator_address, num_processes and process_id, or none of them, to find "
                f"them in {ADDRESS}, {NUMBER} and {OWN} or from the cluster; got "
                f"{coordinator_address!r}, {num_processes} and {process_id}."
            )
    if local_device_ids is not None:
        job = dataclasses.replace(job, local_device_ids=tuple(local_device_ids))
    if not 0 <= job.process_id < job.num_processes:
        raise ArgumentError(
            f"process_id must be from 0 to num_processes - 1; got {job.process_id} of "
            f"{job.num_processes}, from {job.found_in}."
        )
    if job.coordinator_address is not None and job.num_processes > 1:
        if not connected:
            _connect(job, job.coordinator_address, bind, timeout)
        Watch(job.num_processes, job.process_id, job.coordinator_address, timeouts).start()
    elif "alone" in timeouts.others:
        watch_alone(timeouts.others["alone"])
    return job


def _wait_as_spare() -> None:
    """Wait until the launcher needs this process, if it is a spare one; end with the launcher."""
    if environ.pop(SPARE, None) is None:
        return
    # Where the launcher writes what this process would have had in its environment.
    given = sys.stdin.readline()
    if not given:
        # Or another program of the same command has been told already.
        print("crossshard: a spare process ends, since its launcher has.", file=sys.stderr)
        os._exit(1)
    environ.update(json.loads(given))


def _connect(job: Job, address: str, bind: str | None, timeout: float) -> None:
    split_address(address)
    if _jax.backend_is_running():
        raise DistributedError(
            "JAX is running already and has counted its devices. Call "
            "crossshard.distributed.initialize() before the first JAX operation, such as "
            "jax.devices() or jnp.zeros(3)."
        )
    # Only process 0 listens; the others may not know its interfaces.
    listens = bind_address(address, bind) if job.process_id == 0 else address
    if job.process_id == 0:
        check_unused(*split_address(listens))
    of_launcher = environ.get(NUMBER) == str(job.num_processes)
    if of_launcher:
        _jax.share_programs_between_cpus()
        tell_launcher(job.process_id, CONNECTS)
    try:
        _jax.start_coordination(
            address,
            job.num_processes,
            job.process_id,
            devices=job.local_device_ids,
            bind_address=listens,
            seconds=timeout,
            heartbeat_seconds=_JAX_HEARTBEAT_SECONDS,
        )
        return
    except TimeoutError:
        came = {who for who, what in told_launcher() if what == CONNECTS} if of_launcher else set()
        missing = [each for each in map(str, range(job.num_processes)) if came and each not in came]
        if missing:
            why = f"process {', '.join(missing)} has not called initialize"
            how = f"has not entered initialize for {int(timeout)} seconds, and others wait for it"
            late = Verdict.of(Kind.STALLED, int(missing[0]), how)
            tell_launcher(job.process_id, str(late))
        elif answers(address):
            why = "process 0 is there, and another one has not called initialize with this address"
        else:
            why = (
                "nothing listens there. Process 0 has not called initialize, or has another "
                "address, or cannot be reached"
            )
    except jax.errors.JaxRuntimeError as error:
        why = f"{str(error).splitlines()[0]:.300}"
    raise DistributedError(
        f"Process {job.process_id} of {job.num_processes} did not meet the others at {address} in "
        f"{timeout:g} seconds: {why}."
    )


def find_job(seconds: float) -> Job:
    """Return the job that the environment describes; one process if it describes none.

    A cluster's own service may take so many seconds to answer.
    """
    # Ray's workers have the variables of what has started Ray, such as Slurm, too.
    job = (
        _of_connected()
        or _of_variables()
        or _of_ray(seconds)
        or _of_open_mpi_5()
        or _of_jax(seconds)
    )
    # Under another launcher, as torchrun, MPICH or Open MPI, each process would train alone.
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if job is None else ():
        if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
            raise ArgumentError(
                f"{name}={environ[name]} says that there are several processes, but not where they "
                f"meet. Pass coordinator_address, num_processes and process_id, or set {ADDRESS}, "
                f"{NUMBER} and {OWN}."
            )
    return job or Job()


def _of_connected() -> Job | None:
    address = _jax.coordinator_address()
    if address is None:
        return None
    return Job(*_jax.processes_of_job(), address, None, "jax.distributed")


def _of_variables() -> Job | None:
    if not (environ.get(NUMBER) or environ.get(OWN)):
        return None
    given = [name for name in (ADDRESS, NUMBER, OWN) if environ.get(name)]
    missing = [name for name in (ADDRESS, NUMBER, OWN) if name not in given]
    if missing:
        raise ArgumentError(
            f"{' and '.join(given)} is set, but {' and '.join(missing)} is not. Set all of "
            f"{ADDRESS}, {NUMBER} and {OWN}, or none."
        )
    number, own = (_number(name) for name in (NUMBER, OWN))
    return Job(number, own, environ[ADDRESS], _devices(), "environment variables")


def _of_ray(seconds: float) -> Job | None:
    # Whoever runs in a worker of Ray Train has it loaded.
    if "ray.train" not in sys.modules:
        return None
    import ray.train

    try:
        worker = ray.train.get_context()
        number, own = worker.get_world_size(), worker.get_world_rank()
    except (RuntimeError, DeprecationWarning):
        # The driver, a task, or an actor of one's own; a function that Ray Tune runs.
        return None
    if number == 1 and not type(worker).__module__.startswith("ray.train.v2"):
        # The first version of Ray Train says so everywhere.
        return None
    # Some trainers show a worker the GPUs of all workers of its host.
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    devices = [visible.index(each) for each in map(str, ray.get_gpu_ids()) if each in visible]
    address = None
    if number > 1:
        alone = worker.get_local_world_size() == number
        host = LOOPBACK if alone else ray.util.get_node_ip_address()
        own_address = _joined(host, listen(host, 0)) if own == 0 else None
        address = _told_by_first(own_address, f"Process {own} of {number}", seconds)
    return Job(number, own, address, _devices() or tuple(devices) or None, "Ray Train")


def _told_by_first(address: str | None, who: str, seconds: float) -> str:
    """Return what process 0 passes here, in all workers of Ray Train, which call this together."""
    try:
        from ray.train.collective import broadcast_from_rank_zero

        return str(_jax.within(seconds, lambda: broadcast_from_rank_zero(address)))
    except TimeoutError:
        raise DistributedError(
            f"{who} did not meet the other workers of Ray in {seconds:g} seconds: another one has "
            f"not called initialize."
        ) from None
    except ImportError as error:
        raise DistributedError(
            f"{who} cannot meet the other workers of Ray: {error} Or pass coordinator_address, "
            f"num_processes and process_id."
        ) from None


def _of_open_mpi_5() -> Job | None:
    # Open MPI 4 sets OMPI_MCA_orte_hnp_uri, which JAX reads. From 5 on the name of the job has the
    # host and the process id of mpirun: prterun-HOST-PID@1.
    started = re.fullmatch(r"prterun-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", ""))
    if started is None or "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    host, pid = started.groups()
    # In the upper end of the ephemeral range, and the same in all processes of a job.
    port = environ.get("JAX_COORDINATOR_PORT") or 61440 + int(pid) % 4096
    number = _number("OMPI_COMM_WORLD_SIZE")
    on_this_host = _number("OMPI_COMM_WORLD_LOCAL_SIZE")
    return Job(
        number,
        _number("OMPI_COMM_WORLD_RANK"),
        environ.get(ADDRESS) or f"{LOOPBACK if on_this_host == number else host}:{port}",
        # As JAX does it under Open MPI 4.
        _devices() or (_number("OMPI_COMM_WORLD_LOCAL_RANK"),),
        "Open MPI 5",
    )


def _of_jax(seconds: float) -> Job | None:
    found = _jax.detected_job(seconds)
    if found is None:
        return None
    name, address, number, own, devices = found
    on_this_host = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or (
        environ.get("SLURM_NTASKS") if environ.get("SLURM_STEP_NUM_NODES") == "1" else None
    )
    if on_this_host == str(number) and not environ.get(ADDRESS):
        address = f"{LOOPBACK}:{address.rpartition(':')[2]}"
    return Job(number, own, address, _devices() or devices, name)


def _number(name: str) -> int:
    if not environ.get(name, "").isdecimal():
        raise ArgumentError(f"{name} must be a number from 0; got {environ.get(name)!r:.60}.")
    return int(environ[name])


def _devices() -> tuple[int, ...] | None:
    given = environ.get(DEVICES)
    if given and not re.fullmatch(r"\d+(,\d+)*", given):
        raise ArgumentError(f"{DEVICES} must be numbers with commas between; got {given!r:.60}.")
    return tuple(map(int, given.split(","))) if given else None


def bind_address(coordinator_address: str, bind: str | None) -> str:
    """Return where process 0 listens: at ``bind``, or at the interface that the address names."""
    host, port = split_address(coordinator_address)
    if bind == ALL_INTERFACES:
        return f"[::]:{port}"
    host = host if bind is None else bind
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        listen(found, 0)
    except OSError as error:
        raise ArgumentError(
            f"Process 0 cannot listen at {host!r:.100}, which must be an interface of this "
            f"machine: {error.strerror or error}. Pass bind= with the address of one, or "
            f"bind={ALL_INTERFACES!r}."
        ) from None
    if bind is not None and ipaddress.ip_address(found).is_unspecified:
        raise ArgumentError(
            f"bind={bind!r} listens on every interface of this machine, to anyone who reaches it. "
            f"If that is meant, write bind={ALL_INTERFACES!r}."
        )
    return _joined(found, port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port`` or ``[IPv6]:port``."""
    parts = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\[\]\s]+)):(\d{1,5})", address)
    if parts is None or not 0 < int(parts[3]) < 65536:
        raise ArgumentError(
            f"coordinator_address must be host:port, as 10.0.0.1:1234 or [fe80::1]:1234; got "
            f"{address!r:.100}."
        )
    return parts[1] or parts[2], int(parts[3])


def check_unused(host: str, port: int) -> None:
    """Raise if something listens at a port of this machine.

    A second coordinator could listen there, too, and processes would meet at the wrong one.
    """
    try:
        listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ArgumentError(
                f"Something listens at port {port} of {host} already, perhaps another job. Name "
                f"another port, or none."
            ) from None


def listen(host: str, port: int) -> int:
    """Raise OSError unless this process can listen there; return the port, any free one for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # The connections of a job that has ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
