"""Self-test: each collective that crossshard uses, run, timed, and compared with numpy."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from crossshard import _jax
from crossshard._text import listed, rate
from crossshard._text import size as in_words
from crossshard.tools.diagnosis.collective_programs import PROGRAMS, CollectiveProgram
from crossshard.tools.diagnosis.deadline import LateError, within
from crossshard.tools.diagnosis.report import CollectiveTest, Finding
from crossshard.tools.inspection.collectives import bytes_sent
from crossshard.tools.inspection.inspect import inspect
from crossshard.tools.planning.chips import Chip, chip_of
from crossshard.tools.planning.links import seconds as seconds_of_links

# Bytes on each device.
SIZES = (4_000, 1_000_000, 32_000_000)

PUBLISHED, MEMORY_COPY = "published", "memory copy"
# The part of what is expected below which a large collective looks wrong. Published peaks are
# reached by half at worst; XLA for CPUs copies what it sends several times over.
_LEAST = {PUBLISHED: 0.2, MEMORY_COPY: 0.005}
_LARGE = 1_000_000

_RUNS = 5
_ENTERED, _WAITING = "crossshard/doctor/entered", "crossshard/doctor/waiting"
# For the others to find, too, that they wait in vain.
_PATIENCE = 2.0
_entered = itertools.count(1)


@dataclasses.dataclass
class Tested:
    """What came of the self-test.

    Attributes:
      tests: those that have ended.
      findings: what is wrong with them.
      expected_from: what their ``expected`` is.
      stuck: whether one of them has not ended.
    """

    tests: list[CollectiveTest]
    findings: list[Finding]
    expected_from: str
    stuck: bool = False


def run(mesh: Mesh, sizes: Sequence[int], seconds: float) -> Tested:
    """Run each collective over all devices of a mesh of one axis; all processes call it.

    Args:
      mesh: it has more than one device.
      sizes: bytes of the larger of operand and result, on each device.
      seconds: how long a run of a collective may take.
    """
    chip = chip_of(mesh.devices.flat[0].device_kind)
    found = Tested([], [], MEMORY_COPY if _copies_count(mesh, chip) else PUBLISHED)
    for program, size in itertools.product(PROGRAMS, sizes):
        what = f"{program.kind} of {in_words(size)}"
        number = enter()
        try:
            # The copies beside it may take as long as they like.
            in_time = functools.partial(within, seconds)
            test, wrong = _tested(program, mesh, size, chip, in_time)
        except LateError:
            found.findings.append(Finding("stuck", late(f"The {what}", number, seconds)))
            found.stuck = True
            break
        except Exception as error:  # whatever the runtime raises
            first = (str(error).splitlines() or [type(error).__name__])[0]
            found.findings.append(Finding("failed", f"The {what} failed: {first:.300}"))
            break
        found.tests.append(test)
        found.findings += wrong
    if jax.process_index() == 0:
        # Others measure the same.
        found.findings += _slow(found)
    return found


def enter() -> int:
    """Tell the other processes that this one enters something that all enter; its number."""
    number = next(_entered)
    if _jax.has_coordinator():
        _jax.tell_again(f"{_ENTERED}/{_jax.processes_of_job()[1]}", str(number))
    return number


def late(what: str, number: int, seconds: float) -> str:
    """A sentence on something that has not ended, and on the processes that have not entered it."""
    sentence = f"{what} has not ended in {seconds:g} seconds"
    processes, _ = _jax.processes_of_job()
    if processes == 1:
        return f"{sentence}. See what else runs on this machine, and run it again alone."
    try:
        behind, still = within(seconds, lambda: _who(number))
    except Exception:  # nobody answers
        return f"{sentence}, and the coordinator does not answer. See what process 0 does."
    if behind:
        return f"{sentence}: process {behind} has not entered it. See what that one does."
    if still:
        return f"{sentence}: process {still} has entered it and stands still. See its log."
    return (
        f"{sentence}, and all processes wait in it: they do not reach each other. Open all ports "
        f"between their hosts, or name the interface, as in NCCL_SOCKET_IFNAME=eth0."
    )


def _who(number: int) -> tuple[str, str]:
    """The processes that have not entered something, and those that do not wait in it."""
    processes, own = _jax.processes_of_job()
    _jax.tell_again(f"{_WAITING}/{own}", str(number))
    time.sleep(_PATIENCE)
    found = []
    for folder in (_ENTERED, _WAITING):
        told = _jax.told_below(f"{folder}/")
        latest = (told.get(str(each), "") for each in range(processes))
        late = [
            str(process)
            for process, text in enumerate(latest)
            if not text.isdecimal() or int(text) < number
        ]
        found.append(listed(late, 10))
    return found[0], found[1]


def _tested(
    program: CollectiveProgram,
    mesh: Mesh,
    size: int,
    chip: Chip | None,
    in_time: Callable[[Callable[[], Any]], Any],
) -> tuple[CollectiveTest, list[Finding]]:
    length = program.length(size, mesh.size)
    compiled = in_time(lambda: program.compiled(mesh, length))
    x = program.operand(mesh, length)
    result = in_time(lambda: jax.block_until_ready(compiled(x)))
    wrong = program.wrong(result, length, mesh.size)
    sent = bytes_sent(program.kind, mesh.size, 4 * length)
    is_copied = _copies_count(mesh, chip)
    # In turn, so that other programs slow both down alike.
    copies = _copies(int(sent * len(mesh.local_devices))) if is_copied else itertools.repeat(0.0)
    taken, copied = [], []
    for _ in range(_RUNS):
        taken.append(in_time(lambda: _clocked(compiled, x)))
        copied.append(next(copies))
    at_best = float(np.median(copied))
    if chip is not None:
        at_best = published_seconds(compiled, mesh, chip)
    expected = sent / at_best if at_best else None
    actual = 4 * length * (mesh.size if program.gathers else 1)
    median = float(np.median(taken))
    test = CollectiveTest(program.kind, actual, sent, median, expected, wrong is None)
    return test, [] if wrong is None else [_wrong(program.kind, actual, wrong)]


def _clocked(compiled: Any, x: jax.Array) -> float:
    began = time.perf_counter()
    jax.block_until_ready(compiled(x))
    return time.perf_counter() - began


def _copies_count(mesh: Mesh, chip: Chip | None) -> bool:
    """Whether speeds are compared with copies in memory, for want of published figures."""
    return chip is None and mesh.devices.flat[0].platform == "cpu"


def published_seconds(compiled: Any, mesh: Mesh, chip: Chip) -> float:
    """The time of a program's collectives if links are used at their published bandwidth."""
    devices = list(mesh.devices.flat)
    return sum(seconds_of_links(each, devices, chip) for each in inspect(compiled).counted)


def _copies(size: int) -> Iterator[float]:
    """The seconds that numpy takes to copy so many bytes, again and again."""
    source = np.ones(max(size, 1), np.uint8)
    target = np.zeros_like(source)
    while True:
        began = time.perf_counter()
        np.copyto(target, source)
        yield time.perf_counter() - began


def _wrong(kind: str, size: int, what: str) -> Finding:
    return Finding(
        "wrong values",
        f"The {kind} of {in_words(size)} is wrong in {what}. Train without this device; if another "
        f"one is wrong too, with another version of jaxlib or of the driver.",
    )


def _slow(found: Tested) -> Iterator[Finding]:
    largest: dict[str, Any] = {
        each.kind: each for each in found.tests if each.size >= 0.9 * _LARGE and each.expected
    }
    least = _LEAST[found.expected_from]
    for each in largest.values():
        if each.bandwidth >= least * each.expected:
            continue
        hint = (
            "See what else runs on this machine"
            if found.expected_from == MEMORY_COPY
            else "See that NVLink or InfiniBand are in use: nvidia-smi topo -m, NCCL_DEBUG=INFO"
        )
        yield Finding(
            "slow",
            f"The {each.kind} of {in_words(each.size)} sends {rate(each.bandwidth)} from each "
            f"device, less than {100 * least:g} % of the {rate(each.expected)} of "
            f"{_NAMES[found.expected_from]}. {hint}.",
        )


_NAMES = {PUBLISHED: "the published figures", MEMORY_COPY: "a memory copy here"}
