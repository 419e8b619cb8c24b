"""Initialize: connects this process with the others of its job."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from crossshard import _check, _jax
from crossshard.distributed.job import (
    ADDRESS,
    CONNECTS,
    NUMBER,
    OWN,
    VERDICTS,
    Job,
    answers,
    bind_address,
    check_unused,
    find_job,
    split_address,
    tell_launcher,
    told_launcher,
)
from crossshard.distributed.judge import Kind, Timeouts, Verdict, check_seconds
from crossshard.distributed.watch import watch, watch_alone
from crossshard.errors import ArgumentError, ArgumentTypeError, DistributedError

_JAX_HEARTBEAT_SECONDS = 100
_STALL_SECONDS = 120.0


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

    Without arguments it finds the job: from ``crossshard launch`` or its environment variables,
    Open MPI 5, and what JAX knows, which are Slurm, Open MPI 4, Kubernetes and TPU pods. If there
    is none, the process works alone, so that one script runs with a launcher and without.

    Process 0 listens only at the interface that ``coordinator_address`` names, where JAX listens
    at all of them: whoever reaches the coordinator can end the job.

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
        leaves, the others leave within seconds, with ``PROCESS_LOST``. By name if they differ, as
        in ``{"start": 900, "step": 60, "save": 300, "alone": 600}``: until the first step is
        entered, for steps and all else, for one of the calls or what ``entering`` names, and for a
        job of one process, which is not watched without: it leaves if it enters nothing for so
        long after a step. ``"compile"`` has 600 and ``"lock"`` 60, unless you name them.

    Returns:
      What it found.

    Raises:
      ArgumentError: the job is described in part, or process 0 cannot listen there, or something
        else does.
      ArgumentTypeError: an argument has a wrong type.
      DistributedError: JAX is running already, or the others did not come in time.

    >>> initialize().num_processes
    1
    """
    if not isinstance(local_device_ids, tuple | list | None):
        raise ArgumentTypeError(
            f"local_device_ids must be a tuple of ints; got {_check.described(local_device_ids)}."
        )
    for each in local_device_ids or ():
        _check.whole_number("Each of local_device_ids", each, least=0)
    if not isinstance(coordinator_address, str | None):
        raise ArgumentTypeError(
            f"coordinator_address must be host:port, a str; got "
            f"{type(coordinator_address).__name__}."
        )
    for name, number in (("num_processes", num_processes), ("process_id", process_id)):
        if number is not None:
            _check.whole_number(name, number, least=None)
    if bind is not None:
        _check.word("bind", bind)
    check_seconds("timeout", timeout)
    timeouts = Timeouts.read(stall_timeout, _STALL_SECONDS)
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
        _connect(job, bind, timeout, max(timeouts.step, *timeouts.others.values(), 0))
        watch(job, timeouts)
    elif "alone" in timeouts.others:
        watch_alone(timeouts.others["alone"])
    return job


def _connect(job: Job, bind: str | None, timeout: float, stall_timeout: float) -> None:
    address = str(job.coordinator_address)
    split_address(address)
    if _jax.has_coordinator():
        raise DistributedError("initialize is called once in a process; this is the second time.")
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
    of_launcher = os.environ.get(NUMBER) == str(job.num_processes)
    if of_launcher:
        tell_launcher(job.process_id, CONNECTS)
    try:
        _jax.start_coordination(
            address,
            job.num_processes,
            job.process_id,
            devices=job.local_device_ids,
            bind_address=listens,
            seconds=timeout,
            # JAX aborts the process then, without a word on who it waits for.
            heartbeat_seconds=max(_JAX_HEARTBEAT_SECONDS, int(min(2 * stall_timeout, 1e6))),
        )
        return
    except TimeoutError:
        told = told_launcher(Path(os.environ.get(VERDICTS, os.devnull))) if of_launcher else []
        came = {who for who, what in told if what == CONNECTS}
        missing = [each for each in map(str, range(job.num_processes)) if came and each not in came]
        why = _why(address, missing)
        if missing:
            how = f"has not entered initialize for {int(timeout)} seconds, and others wait for it"
            late = Verdict.of(Kind.STALLED, int(missing[0]), how)
            tell_launcher(job.process_id, str(late))
    except jax.errors.JaxRuntimeError as error:
        why = f"{str(error).splitlines()[0]:.300}"
    raise DistributedError(
        f"Process {job.process_id} of {job.num_processes} did not meet the others at {address} in "
        f"{timeout:g} seconds: {why}."
    )


def _why(address: str, missing: list[str]) -> str:
    if missing:
        return f"process {', '.join(missing)} has not called initialize"
    if answers(address):
        return "process 0 is there, and another one has not called initialize with this address"
    return (
        "nothing listens there. Process 0 has not called initialize, or has another address, or "
        "cannot be reached"
    )
