"""Self-test: each collective that crossshard uses, run, timed, and compared with numpy."""

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from crossshard._text import size as in_words
from crossshard.tools.diagnosis.collective_programs import PROGRAMS, CollectiveProgram
from crossshard.tools.diagnosis.deadline import LateError, enter, late, within
from crossshard.tools.diagnosis.report import CollectiveTest, Finding
from crossshard.tools.inspection.collectives import bytes_sent

# Bytes on each device.
SIZES = (4_000, 1_000_000, 32_000_000)
_RUNS = 5


def run(
    mesh: Mesh, sizes: Sequence[int], seconds: float
) -> tuple[list[CollectiveTest], list[Finding]]:
    """Run each collective over all devices of a mesh of one axis; all processes call it.

    Args:
      mesh: it has more than one device.
      sizes: bytes of the larger of operand and result, on each device.
      seconds: how long a run of a collective may take.

    Returns:
      The tests that have ended, and what is wrong.
    """
    tests: list[CollectiveTest] = []
    found: list[Finding] = []
    for program, size in itertools.product(PROGRAMS, sizes):
        what = f"The {program.kind} of {in_words(size)}"
        number = enter()
        try:
            test, wrong = _tested(program, mesh, size, seconds)
        except LateError:
            found.append(Finding("stuck", late(what, number, seconds)))
            break
        except Exception as error:  # whatever the runtime raises
            first = (str(error).splitlines() or [type(error).__name__])[0]
            found.append(Finding("failed", f"{what} failed: {first:.300}"))
            break
        tests.append(test)
        found += wrong
    return tests, found


def _tested(
    program: CollectiveProgram, mesh: Mesh, size: int, seconds: float
) -> tuple[CollectiveTest, list[Finding]]:
    in_time = functools.partial(within, seconds)
    length = program.length(size, mesh.size)
    compiled = in_time(lambda: program.compiled(mesh, length))
    x = program.operand(mesh, length)
    result = in_time(lambda: jax.block_until_ready(compiled(x)))
    wrong = program.wrong(result, length, mesh.size)
    sent = bytes_sent(program.kind, mesh.size, 4 * length)
    copies = _copies(int(sent * len(mesh.local_devices))) if _is_on_cpus(mesh) else None
    # In turn, so that other programs slow both down alike; copies may take as long as they like.
    runs = [
        (in_time(lambda: _clocked(compiled, x)), next(copies) if copies else 0.0)
        for _ in range(_RUNS)
    ]
    taken, copied = zip(*runs, strict=True)
    expected = sent / float(np.median(copied)) if copies else None
    actual = 4 * length * (mesh.size if program.gathers else 1)
    median = float(np.median(taken))
    test = CollectiveTest(program.kind, actual, sent, median, expected, wrong is None)
    if wrong is None:
        return test, []
    sentence = (
        f"The {program.kind} of {in_words(actual)} is wrong in {wrong}. Train without this device; "
        f"if another one is wrong too, with another version of jaxlib or of the driver."
    )
    return test, [Finding("wrong values", sentence)]


def _clocked(compiled: Any, x: jax.Array) -> float:
    began = time.perf_counter()
    jax.block_until_ready(compiled(x))
    return time.perf_counter() - began


def _is_on_cpus(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "cpu")


def _copies(size: int) -> Iterator[float]:
    """The seconds that numpy takes to copy so many bytes, again and again."""
    source = np.ones(max(size, 1), np.uint8)
    target = np.zeros_like(source)
    while True:
        began = time.perf_counter()
        np.copyto(target, source)
        yield time.perf_counter() - began
