"""Benchmark of the import time that crossshard adds to JAX and Optax."""

import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.options import BenchOptions
from benchmarks.progress import Screen
from benchmarks.result import Result
from benchmarks.timing import Timing

WITHOUT = "jax, optax"
WITH = f"{WITHOUT}, crossshard"

_SCRIPT = f"""
import time
began = time.perf_counter()
import {WITHOUT}
needed = time.perf_counter()
import crossshard
print(needed - began, time.perf_counter() - began)
"""


def measure(options: BenchOptions, screen: Screen, versions: dict[str, str]) -> Iterator[Result]:
    """One result: in each round a new interpreter imports the dependencies, then crossshard."""
    screen.tell("imports in fresh interpreters")
    # A warm-up: it reads files from the disk and compiles modules to bytecode.
    _import()
    seconds: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    for number in range(1, options.rounds + 1):
        for name, taken in zip(seconds, _import(), strict=True):
            seconds[name].append(taken)
        screen.round(number)
    yield Result("import", 0, None, Timing(1, seconds), differences={})


def _import() -> list[float]:
    """The seconds to import the dependencies, and to import them and crossshard."""
    # Otherwise our modules may be compiled each time, unlike installed ones.
    caching = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, text=True, check=True, env=caching
    )
    return [float(taken) for taken in ran.stdout.split()]
