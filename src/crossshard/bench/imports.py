"""The bench of the import: what crossshard adds to importing JAX, Optax and Flax."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from crossshard.bench.options import BenchOptions
from crossshard.bench.result import Result, Screen
from crossshard.bench.rivals import Turn
from crossshard.bench.turns import take_turns

_WITHOUT = "jax, optax, flax.nnx"
WITH, WITHOUT = f"{_WITHOUT}, crossshard", _WITHOUT


class _Interpreter:
    """A fresh interpreter each time, which imports what its name says and ends."""

    def __init__(self, modules: str) -> None:
        self.name = modules

    def run(self, steps: int) -> Turn:
        """Start so many, one after the other."""
        # Else our modules may be compiled again each time, unlike those that pip has installed.
        caching = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        began = time.perf_counter()
        for _ in range(steps):
            subprocess.run([sys.executable, "-c", f"import {self.name}"], check=True, env=caching)
        return Turn(time.perf_counter() - began, sample=[])


def measure(options: BenchOptions, screen: Screen) -> Iterator[Result]:
    """One result: interpreters that import crossshard as well, and such that do not."""
    screen.tell("imports in fresh interpreters")
    rivals = [_Interpreter(WITH), _Interpreter(WITHOUT)]
    timing, differences = take_turns(rivals, options.rounds, screen.round)
    yield Result("import", 0, None, timing, differences)
