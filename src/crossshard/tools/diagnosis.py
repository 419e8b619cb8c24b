"""doctor: checks this machine, JAX and the job, sums over all devices, and says what is wrong.

Calls that may never end run in a thread, which is left alone once its time is over. The processes
of a job tell each other which sum they have entered, so that a missing process can be named.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import crossshard
from crossshard import _check, _jax, _text
from crossshard._annotations import Json
from crossshard.distributed.job import (
    ADDRESS,
    NUMBER,
    OWN,
    Job,
    find_job,
    initialize,
    split_address,
)
from crossshard.errors import ArgumentError, ArgumentTypeError, CrossshardError, DeadlockWarning
from crossshard.shards.devices import shard_mesh, warn_of_deadlock
from crossshard.tools.inspection.collectives import bytes_sent
from crossshard.tools.quiet import quiet

# The sizes of the sums, in bytes on each device.
SIZES = (4_000, 1_000_000, 32_000_000)
# Less than the 40 seconds after which XLA for CPUs aborts the process.
SECONDS = 30.0
_RUNS = 5
# float32 has all whole numbers up to this one, so sums below it are exact in any order.
_EXACT = 2**24
_SHOWN = (
    *("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "libtpu"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-rocm7-plugin", "jax-rocm7-pjrt"),
)
_SETTINGS = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "CUDA_VISIBLE", "GLIBC_TUNABLES", "NPROC")
_ENTERED = "crossshard/doctor/in"
_entered = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that looks wrong.

    Attributes:
      kind: its name, such as ``"alone"``; the page on ``doctor`` lists them.
      sentence: what it is, and what to write instead.
    """

    kind: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that JAX has found.

    Attributes:
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      kind: the name of the first device, such as ``"NVIDIA H100 80GB HBM3"``.
      number: the number of devices of all processes.
      local: the number of devices of this process.
      processes: the number of processes.
      process: the index of this process.
      memory: the bytes of one device; for CPUs, those of the machine; ``None`` if unknown.
    """

    platform: str
    kind: str
    number: int
    local: int
    processes: int
    process: int
    memory: int | None

    def __str__(self) -> str:
        own = f", {self.local} of this process" if self.processes > 1 else ""
        of = "on a machine with " if self.platform == "cpu" else "with "
        memory = "" if self.memory is None else f", {of}{_text.size(self.memory)}"
        kind = "" if self.kind == self.platform else f" ({self.kind})"
        return f"{self.number} × {self.platform}{kind}{own}{memory}"


@dataclasses.dataclass(frozen=True)
class CollectiveTest:
    """One collective of one size, run on all devices.

    Attributes:
      kind: ``"all-reduce"``.
      size: the bytes of the array on each device.
      bytes_sent: the bytes that a device sends, with the optimal algorithm.
      seconds: the time of one run, the median of several.
      right: whether the devices of this process got the same values as numpy.
    """

    kind: str
    size: int
    bytes_sent: float
    seconds: float
    right: bool

    @property
    def bandwidth(self) -> float:
        """The bytes that a device has sent per second."""
        return self.bytes_sent / self.seconds


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What ``crossshard.doctor`` has found: print it, or read its attributes.

    Attributes:
      versions: the versions of Python, crossshard and the packages that it runs on.
      devices: the devices that JAX has found; ``None`` if it found none in time.
      job: which processes train together: ``num_processes``, ``process_id``,
        ``coordinator_address``, ``local_device_ids``; ``found_in`` says where these come from, and
        ``connected`` whether the processes have met.
      settings: the environment variables that JAX, XLA and crossshard read here.
      tests: the test of the collective in each size; empty without a self-test.
      findings: what looks wrong in this process.
      stuck: whether a collective, or the start of JAX, did not end in time.

    >>> Diagnosis({}, None, {}, {}, (), ()).ok
    True
    """

    versions: Mapping[str, str]
    devices: Devices | None
    job: Mapping[str, Json]
    settings: Mapping[str, str]
    tests: tuple[CollectiveTest, ...]
    findings: tuple[Finding, ...]
    stuck: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing looks wrong."""
        return not self.findings

    def describe(self) -> str:
        """Return the machine, a line for each size of the collective, and what looks wrong."""
        pairs = lambda given, sign: [f"{name}{sign}{each}" for name, each in given.items()]
        rows = {
            "versions": ", ".join(pairs(self.versions, " ")),
            "devices": str(self.devices or ""),
            "processes": _describe_job(self.job),
            "settings": " ".join(pairs(self.settings, "=")),
        }
        wrapped = textwrap.TextWrapper(
            100, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False
        )
        lines = [wrapped.fill(f"{name:<11}{text or 'none'}") for name, text in rows.items()]
        if self.tests:
            head = ("collective", "size", "sent", "time", "speed", "values")
            lines += ["", _text.table(head, list(map(_row, self.tests)))]
        number = len(self.findings)
        few = ("Nothing looks wrong.", "One thing looks wrong:")
        lines += ["", few[number] if number < 2 else f"{number} things look wrong:"]
        return "\n".join([*lines, *(f"  {each.sentence}" for each in self.findings)])

    __str__ = describe

    def to_json(self, **kwargs: Any) -> str:
        """Return the attributes and ``ok`` as JSON; the arguments are those of ``json.dumps``."""
        return json.dumps({"ok": self.ok, **dataclasses.asdict(self)}, **kwargs)


def _row(test: CollectiveTest) -> tuple[str, ...]:
    sizes = (_text.size(test.size), _text.size(test.bytes_sent), _text.time(test.seconds))
    rate = f"{_text.size(test.bandwidth)}/s"
    return (test.kind, *sizes, rate, "right" if test.right else "WRONG")


def _describe_job(job: Mapping[str, Any]) -> str:
    number = job.get("num_processes", 1)
    if number == 1:
        return "1"
    told = "" if job["found_in"] == "nothing" else f", from {job['found_in']}"
    met = "connected" if job["connected"] else "not connected"
    where = f", at {address}" if (address := job["coordinator_address"]) else ""
    return f"{number}{told}; this is {job['process_id']}, {met}{where}"


def doctor(
    *, self_test: bool = True, sizes: Sequence[int] = SIZES, timeout: float = SECONDS
) -> Diagnosis:
    """Say what looks wrong with this machine, with JAX on it and with the job, before a run.

    It reads versions, devices, settings and the description of the job, and sums arrays over all
    devices: it compares the values with numpy's, and measures the speed.

    In a job of several processes all call it, after ``crossshard.distributed.initialize()``.

    Args:
      self_test: whether to sum over all devices.
      sizes: the bytes of the arrays on each device.
      timeout: how many seconds the start of JAX, and each sum, may take. What takes longer is
        reported as a finding, and goes on in a thread. XLA for CPUs aborts the process after 40
        seconds.

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
    """Do what ``doctor`` does; as a command, also connect to the other processes."""
    _check.flag("self_test", self_test)
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ArgumentTypeError(
            f"sizes must be a sequence of bytes, as [4000, 1000000]; got {type(sizes).__name__}."
        )
    for name, given in (("timeout", timeout), *(("sizes", each) for each in sizes)):
        if not _check.number(name, given) > 0:
            raise ArgumentError(f"{name} must be above 0; got {given}.")
    timeout = min(float(timeout), threading.TIMEOUT_MAX)
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SETTINGS)}
    job, found = _find_job(timeout, meet=as_command)
    platforms = os.environ.get("JAX_PLATFORMS")
    start = f"The start of JAX{f' with JAX_PLATFORMS={platforms}' if platforms else ''}"
    devices: Devices | None = _try(found, "start", start, timeout, _find_devices)
    tests = list[CollectiveTest]()
    if devices is not None:
        mesh, of_threads = _mesh(devices.number)
        found += of_threads
        for size in sizes if self_test and devices.number > 1 else ():
            test = _test_all_reduce(found, mesh, size, timeout)
            if test is None:
                break
            tests.append(test)
    connected = _jax.has_coordinator()
    if connected:
        number, own = _jax.processes_of_job()
        job = dataclasses.replace(job, num_processes=number, process_id=own)
    return Diagnosis(
        _installed(),
        devices,
        dataclasses.asdict(job) | {"connected": connected},
        settings,
        tuple(tests),
        tuple(found),
        stuck=any(each.kind == "stuck" for each in found),
    )


# Versions and devices.


def _installed() -> dict[str, str]:
    """Return the versions of Python, crossshard and the packages that it runs on."""
    found = {"crossshard": crossshard.__version__, "Python": platform.python_version()}
    for name in _SHOWN:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # The imported JAX, even if another version is installed.
    return found | {"jax": jax.__version__}


def _find_devices() -> Devices:
    everyone, own = jax.devices(), jax.local_devices()
    of_device = lambda: (own[0].memory_stats() or {}).get("bytes_limit")
    of_machine = lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = of_machine() if own[0].platform == "cpu" else of_device()
    processes = (jax.process_count(), jax.process_index())
    kinds = (own[0].platform, own[0].device_kind)
    return Devices(*kinds, len(everyone), len(own), *processes, memory)


def _first_line(error: BaseException) -> str:
    # JAX asserts that a platform of JAX_PLATFORMS has a plugin, and says nothing else.
    silent = (
        f"{type(error).__name__}, without a word, as where JAX has no plugin for a platform. "
        f"Install it, such as by pip install 'jax[cuda12]'"
    )
    lines = str(error).splitlines() or [silent]
    return f"{lines[0].rstrip('.'):.300}"


def _mesh(number: int) -> tuple[Mesh, list[Finding]]:
    """Return the mesh that crossshard uses by default, and its warnings as findings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeadlockWarning)
        mesh = shard_mesh(number)
        # ``shard_mesh`` only warns when it makes a new mesh.
        warn_of_deadlock(mesh)
    sentences = {str(each.message) for each in caught if each.category is DeadlockWarning}
    return mesh, [Finding("threads", sentence) for sentence in sentences]


# The processes of the job.


def _find_job(timeout: float, *, meet: bool) -> tuple[Job, list[Finding]]:
    """Return the job that the environment describes, and findings about it.

    The job is not read if this process has already met the others.

    Args:
      timeout: how many seconds a cluster's own service may take to answer, and the others to come.
      meet: whether to connect to the other processes.
    """
    job = Job()
    try:
        if not _jax.has_coordinator():
            job = find_job(timeout)
        if job.num_processes == 1:
            return job, []
        split_address(str(job.coordinator_address))
        if meet:
            with quiet():
                # Longer than ``timeout``, so that ``doctor`` can name what hangs before the watch
                # of the job ends the process.
                initialize(timeout=timeout, stall_timeout=max(1, 2 * timeout))
            return job, []
        kind = "alone"
        sentence = (
            f"{job.found_in} says that {job.num_processes} processes train together, but this one "
            "has not met the others and trains alone. Call crossshard.distributed.initialize() "
            "before the first JAX operation."
        )
    except CrossshardError as error:
        kind, sentence = "job", str(error)
    except Exception as error:  # whatever a cluster's detection raises
        why = f"JAX cannot tell the job: {_first_line(error)}."
        kind, sentence = "job", f"{why} Set {ADDRESS}, {NUMBER} and {OWN}."
    return job, [Finding(kind, sentence)]


def _try(
    found: list[Finding], kind: str, what: str, seconds: float, function: Callable[[], Any]
) -> Any:
    """Run a function in a thread; return ``None``, and add a finding, if it raises or hangs.

    Args:
      found: the list to which the finding is added.
      kind: the kind of the finding, if the function raises.
      what: the name of the function in the finding.
      seconds: how long to wait.
      function: the function, which all processes of the job call.
    """
    number, (processes, own) = next(_entered), _jax.processes_of_job()
    if processes > 1:
        _jax.kv_overwrite(f"{_ENTERED}/{own}", str(number))
    ended: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            ended.set_result(function())
        except BaseException as error:
            ended.set_exception(error)

    # Gloo writes to stdout. stderr stays: XLA and the watch of the job write there why they end the
    # process.
    with quiet(1):
        # Not in a pool, for whose threads Python waits when it exits.
        threading.Thread(target=run, daemon=True).start()
        concurrent.futures.wait([ended], seconds)
    if not ended.done():
        who = _describe_missing(number, processes)
        found.append(Finding("stuck", f"{what} has not ended in {seconds:g} seconds{who}."))
    elif error := ended.exception():
        found.append(Finding(kind, f"{what} failed: {_first_line(error)}."))
    else:
        return ended.result()
    return None


def _describe_missing(number: int, processes: int) -> str:
    """Describe which processes have not entered the call that has not ended."""
    if processes == 1:
        return ""
    try:
        entered = {who: int(text) for who, text in _jax.kv_get_dir(f"{_ENTERED}/").items()}
    except Exception:  # nobody answers
        return ", and the coordinator does not answer"
    # A process with a larger number has entered this call, too, and gone on.
    if behind := [str(each) for each in range(processes) if entered.get(str(each), 0) < number]:
        return f": process {_text.listed(behind, 10)} has not entered it"
    stands = "one of them stands still, or they do not reach each other"
    return f", and all processes have entered it: {stands}"


# The sum over all devices.


def _test_all_reduce(
    found: list[Finding], mesh: Mesh, size: int, timeout: float
) -> CollectiveTest | None:
    """Sum an array of this size on each device over a mesh of one axis; ``None`` if this fails."""
    what, length = f"The all-reduce of {_text.size(size)}", max(size // 4, 1)
    summed = _try(found, "failed", what, timeout, lambda: _all_reduce(mesh, length))
    if summed is None:
        return None
    seconds, result = summed
    numbers, marks = _test_values(length, mesh.size)
    right = (mesh.size * numbers + marks.sum()).astype(np.float32)
    wrong: list[Finding] = []
    for each in result.addressable_shards:
        got = np.asarray(each.data)
        differs = np.flatnonzero(got != right)
        if differs.size:
            shard, at = (each.index[0].start or 0) // length, int(differs[0])
            sentence = (
                f"{what} is wrong in {differs.size} of {got.size} values on shard {shard} "
                f"({each.device}); value {at} is {got[at]:g} and should be {right[at]:g}. Train "
                "without this device."
            )
            wrong.append(Finding("wrong values", sentence))
    found += wrong[:1]
    sent = bytes_sent("all-reduce", mesh.size, 4 * length)
    return CollectiveTest("all-reduce", 4 * length, sent, seconds, not wrong)


def _all_reduce(mesh: Mesh, length: int) -> tuple[float, jax.Array]:
    """Return the seconds of a sum, the median of several, and its result."""
    numbers, marks = _test_values(length, mesh.size)
    spec = PartitionSpec(*mesh.axis_names)
    summed = lambda x: lax.psum(x, mesh.axis_names[0])
    mapped = jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    part = lambda index: (numbers + marks[(index[0].start or 0) // length]).astype(np.float32)
    shape, sharding = (mesh.size * length,), NamedSharding(mesh, spec)
    x = jax.make_array_from_callback(shape, sharding, part)
    with jax.disable_jit(False):
        compiled = jax.jit(mapped).lower(x).compile()
    result, seconds = jax.block_until_ready(compiled(x)), []
    for _ in range(_RUNS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(x))
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)), result


def _test_values(length: int, shards: int) -> tuple[Any, Any]:
    """Return numbers that are the same on all shards, and a mark of each shard to add to them.

    They show a shard that is left out, counted twice or taken for another one, and a sum that was
    rounded to 16 bits.
    """
    marks = np.arange(shards) ** 2 % 251
    period = max((_EXACT - int(marks.sum())) // shards, 1)
    return np.arange(length) % min(period, 65521), marks
