"""doctor: look at this machine, at JAX and at the job, run each collective, say what is wrong."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from crossshard import _check, _jax
from crossshard.distributed.initialize import initialize
from crossshard.distributed.job import Job
from crossshard.errors import ArgumentError, ArgumentTypeError, CrossshardError
from crossshard.shards.devices import shard_mesh
from crossshard.tools.diagnosis import (
    differences,
    machine,
    processes,
    self_test,
    settings,
    versions,
)
from crossshard.tools.diagnosis.deadline import LateError, enter, late, within
from crossshard.tools.diagnosis.report import CollectiveTest, Devices, Diagnosis, Finding
from crossshard.tools.diagnosis.self_test import SIZES
from crossshard.tools.quiet import quiet

# Before the 40 seconds after which XLA for CPUs aborts the process.
SECONDS = 30.0


def doctor(
    *, self_test: bool = True, sizes: Sequence[int] = SIZES, timeout: float = SECONDS
) -> Diagnosis:
    """Say what looks wrong with this machine, with JAX on it and with the job, before a run.

    It reads versions, devices, settings and what describes the processes of the job, and runs each
    collective that crossshard uses over all devices: compares its values with numpy's, and its
    speed with published figures for TPUs and GPUs.

    In a job of several processes all call it, after ``crossshard.distributed.initialize()``.

    Args:
      self_test: whether to run collectives.
      sizes: bytes on each device, of the larger of operand and result.
      timeout: how many seconds JAX may take to start, and a run of a collective.
        What takes longer is a finding, and goes on in a thread. XLA for CPUs aborts the process
        after 40 seconds.

    Returns:
      A Diagnosis: print it, read its attributes, or call ``to_json()``.

    Raises:
      ArgumentError: ``timeout`` or a size is not positive.
      ArgumentTypeError: an argument has a wrong type.

    >>> found = doctor(self_test=False)
    >>> found.devices.platform, found.tests
    ('cpu', ())
    """
    return diagnose(run_self_test=self_test, sizes=sizes, timeout=timeout, as_command=False)


def diagnose(
    *, run_self_test: bool, sizes: Sequence[int], timeout: float, as_command: bool
) -> Diagnosis:
    """As ``doctor``; as a command, it also meets the other processes."""
    _check.flag("self_test", run_self_test)
    _check_arguments(sizes, timeout)
    known = versions.installed()
    found = [*versions.findings(known), *settings.findings()]
    job = Job()
    if not _jax.has_coordinator():
        job, wrong = processes.described_job(timeout)
        if as_command and job.num_processes > 1 and not wrong:
            wrong += _connected(job, timeout)
        found += [*wrong, *([] if wrong else processes.not_connected(job))]
    flags = settings.refused_flags()
    devices, of_start = (None, flags) if flags else _started(timeout)
    found += of_start
    mesh, tests = None, list[CollectiveTest]()
    if devices is not None:
        found += [*machine.findings(devices), *settings.findings_about_devices(devices)]
        found += differences.findings({**known, **settings.shown()}, timeout)
        mesh = shard_mesh(devices.number)
        if run_self_test and devices.number > 1:
            # Gloo writes to stdout.
            with quiet(1):
                tests, wrong = self_test.run(mesh, sizes, timeout)
            found += wrong
    stuck = any(each.kind == "stuck" for each in found)
    return Diagnosis(
        known,
        devices,
        {} if mesh is None else dict(mesh.shape),
        _as_data(job),
        settings.shown(),
        tuple(tests),
        tuple(found if stuck else differences.own(found, timeout)),
        tuple(settings.notes(devices)),
        stuck,
    )


def _as_data(job: Job) -> dict[str, Any]:
    connected = _jax.has_coordinator()
    data = dataclasses.asdict(job)
    if connected:
        data["num_processes"], data["process_id"] = _jax.processes_of_job()
    return data | {"connected": connected}


def _connected(job: Job, timeout: float) -> list[Finding]:
    """Meet the other processes of the job; what is wrong if they do not come."""
    try:
        with quiet():
            # What stands still is named here, before the watch of the job ends the process.
            initialize(timeout=timeout, stall_timeout=max(1, 2 * timeout))
    except CrossshardError as error:
        return [Finding("job", str(error))]
    return []


def _started(timeout: float) -> tuple[Devices | None, list[Finding]]:
    """The devices, once JAX has started; what is wrong if it does not."""
    number = enter()
    # The watch of the job writes to stderr before it ends the process.
    hidden = (1,) if _jax.has_coordinator() else (1, 2)
    try:
        with quiet(*hidden):
            return within(timeout, machine.look), []
    except LateError:
        hint = "JAX waits for all hosts of a slice: start this on each of them"
        return None, [Finding("stuck", f"{late('The start of JAX', number, timeout)} {hint}.")]
    except Exception as error:  # whatever a plugin raises
        return None, [Finding("start", machine.why_jax_does_not_start(error))]


def _check_arguments(sizes: Sequence[int], timeout: float) -> None:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ArgumentTypeError(
            f"sizes must be a sequence of bytes, as [4000, 1000000]; got {type(sizes).__name__}."
        )
    for name, given in (("timeout", timeout), *(("sizes", each) for each in sizes)):
        if not _check.number(name, given) > 0:
            raise ArgumentError(f"{name} must be above 0; got {given}.")
