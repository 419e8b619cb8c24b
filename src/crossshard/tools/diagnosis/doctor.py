"""doctor: look at this machine, at JAX and at the job, sum over all devices, say what is wrong."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _check, _jax
from crossshard._text import size as in_words
from crossshard.distributed.job import Job
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.shards.devices import shard_mesh
from crossshard.tools.diagnosis import machine, processes
from crossshard.tools.diagnosis.processes import LateError, enter, late, within
from crossshard.tools.diagnosis.report import CollectiveTest, Devices, Diagnosis, Finding
from crossshard.tools.inspection.collectives import bytes_sent
from crossshard.tools.quiet import quiet

# Bytes on each device.
SIZES = (4_000, 1_000_000, 32_000_000)
# Before the 40 seconds after which XLA for CPUs aborts the process.
SECONDS = 30.0
_RUNS = 5
# float32 counts to here without a gap, so that sums are exact in any order.
_EXACT = 2**24


def doctor(
    *, self_test: bool = True, sizes: Sequence[int] = SIZES, timeout: float = SECONDS
) -> Diagnosis:
    """Say what looks wrong with this machine, with JAX on it and with the job, before a run.

    It reads versions, devices, settings and what describes the processes of the job, and sums
    arrays over all devices: compares the values with numpy's, and measures the speed.

    In a job of several processes all call it, after ``crossshard.distributed.initialize()``.

    Args:
      self_test: whether to sum over all devices.
      sizes: bytes of the arrays on each device.
      timeout: how many seconds JAX may take to start, and a sum.
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
    return diagnose(self_test, sizes, timeout, as_command=False)


def diagnose(
    self_test: bool, sizes: Sequence[int], timeout: float, *, as_command: bool
) -> Diagnosis:
    """As ``doctor``; as a command, it also meets the other processes."""
    _check.flag("self_test", self_test)
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ArgumentTypeError(
            f"sizes must be a sequence of bytes, as [4000, 1000000]; got {type(sizes).__name__}."
        )
    for name, given in (("timeout", timeout), *(("sizes", each) for each in sizes)):
        if not _check.number(name, given) > 0:
            raise ArgumentError(f"{name} must be above 0; got {given}.")
    versions, settings = machine.installed(), machine.settings()
    job, of_job = processes.find(timeout, meet=as_command)
    devices, of_start = _started(timeout)
    found = [*machine.of_versions(versions), *of_job, *of_start]
    mesh, tests = None, list[CollectiveTest]()
    if devices is not None:
        found += machine.of_cpus(devices)
        found = processes.of_this_one(found, versions | settings, timeout)
        mesh = shard_mesh(devices.number)
        if self_test and devices.number > 1:
            # Gloo writes to stdout.
            with quiet(1):
                tests, wrong = _tests(mesh, sizes, timeout)
            found += wrong
    return Diagnosis(
        versions,
        devices,
        {} if mesh is None else dict(mesh.shape),
        _as_data(job),
        settings,
        tuple(tests),
        tuple(found),
        stuck=any(each.kind == "stuck" for each in found),
    )


def _as_data(job: Job) -> dict[str, Any]:
    connected = _jax.has_coordinator()
    data = dataclasses.asdict(job)
    if connected:
        data["num_processes"], data["process_id"] = _jax.processes_of_job()
    return data | {"connected": connected}


def _started(timeout: float) -> tuple[Devices | None, list[Finding]]:
    """The devices, once JAX has started; what is wrong if it does not."""
    number = enter()
    try:
        # XLA, and the watch of the job, write to stderr why they end the process.
        with quiet(1):
            return within(timeout, machine.look), []
    except LateError:
        hint = "JAX waits for all hosts of a slice: start this on each of them"
        return None, [Finding("stuck", f"{late('The start of JAX', number, timeout)} {hint}.")]
    except Exception as error:  # whatever a plugin raises
        return None, [Finding("start", machine.why_jax_does_not_start(error))]


def _tests(
    mesh: Mesh, sizes: Sequence[int], timeout: float
) -> tuple[list[CollectiveTest], list[Finding]]:
    """Sum arrays of each size; those sums that have ended, and what is wrong."""
    tests: list[CollectiveTest] = []
    found: list[Finding] = []
    for size in sizes:
        what = f"The all-reduce of {in_words(size)}"
        number = enter()
        try:
            test, wrong = _all_reduce(mesh, max(size // 4, 1), timeout)
        except LateError:
            return tests, [*found, Finding("stuck", late(what, number, timeout))]
        except Exception as error:  # whatever the runtime raises
            first = (str(error).splitlines() or [type(error).__name__])[0]
            return tests, [*found, Finding("failed", f"{what} failed: {first:.300}")]
        tests.append(test)
        if wrong is not None:
            sentence = (
                f"{what} is wrong in {wrong}. Train without this device; if another one is wrong "
                f"too, with another version of jaxlib or of the driver."
            )
            found.append(Finding("wrong values", sentence))
    return tests, found


def _all_reduce(mesh: Mesh, length: int, timeout: float) -> tuple[CollectiveTest, str | None]:
    """Sum an array of each device over a mesh of one axis, and say which values are wrong."""
    numbers, marks = _values(length, mesh.size)
    right = (mesh.size * numbers + marks.sum()).astype(np.float32)
    compiled = within(timeout, lambda: _compiled(mesh, length))
    part = lambda index: (numbers + marks[(index[0].start or 0) // length]).astype(np.float32)
    x = jax.make_array_from_callback((mesh.size * length,), _over(mesh), part)

    def run() -> tuple[float, jax.Array]:
        began = time.perf_counter()
        result = jax.block_until_ready(compiled(x))
        return time.perf_counter() - began, result

    _, result = within(timeout, run)
    taken = [within(timeout, run)[0] for _ in range(_RUNS)]
    wrong = _wrong(result, right)
    sent = bytes_sent("all-reduce", mesh.size, 4 * length)
    seconds = float(np.median(taken))
    return CollectiveTest("all-reduce", 4 * length, sent, seconds, wrong is None), wrong


def _values(length: int, shards: int) -> tuple[Any, Any]:
    """Numbers, the same on all shards, and a mark of each shard, which is added to all of them.

    A shard that is left out, counted twice or taken for another one shows, and so does a sum that
    was rounded to 16 bits.
    """
    marks = np.arange(shards) ** 2 % 251
    period = max((_EXACT - int(marks.sum())) // shards, 1)
    return np.arange(length) % min(period, 65521), marks


def _over(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*mesh.axis_names))


def _compiled(mesh: Mesh, length: int) -> Any:
    spec = PartitionSpec(*mesh.axis_names)
    summed = lambda x: lax.psum(x, mesh.axis_names[0])
    mapped = jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((mesh.size * length,), np.float32, sharding=_over(mesh))
    with jax.disable_jit(False):
        return jax.jit(mapped).lower(x).compile()


def _wrong(result: jax.Array, right: Any) -> str | None:
    """What a device of this process has that numpy has not; ``None`` if all is right."""
    for each in result.addressable_shards:
        got = np.asarray(each.data)
        differs = np.flatnonzero(got != right)
        if differs.size:
            shard, at = (each.index[0].start or 0) // got.size, int(differs[0])
            return (
                f"{differs.size} of {got.size} values on shard {shard} ({each.device}); value {at} "
                f"is {got[at]:g} and should be {right[at]:g}"
            )
    return None
