"""How long a loop waits for its loader, with and without `step.prefetch`.

`python -m benchmarks.prefetch`: a loader that takes 20 ms for a batch, and a step that takes 50.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard
from benchmarks import markdown
from benchmarks.machine import this_machine

# As the page says.
_LOADER, _STEP = 0.020, 0.050
_HEADS = ("loop", "ms a step", "least", "most", "threads left")


def main(steps: int = 100, out: Path | None = None) -> None:
    """How long a loop waits for its loader, with and without `step.prefetch`.

    Args:
      steps: steps of each loop.
      out: write a page, such as docs/benchmarks/x.md.
    """
    crossshard.cpu_devices(8)
    last = markdown.measured_on(this_machine(), f"python -m benchmarks.prefetch --steps {steps}")
    markdown.publish("prefetch", [markdown.table(_HEADS, measured(steps))], last, out)


def measured(steps: int) -> list[list[str]]:
    """The rows of the table: a loop without, and one with two batches ahead."""
    loss = lambda w, x: jnp.mean((x @ w - 1) ** 2)
    step = crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=8)
    ways: dict[str, Callable[[Iterable[Any]], Iterable[Any]]] = {
        "for batch in loader": lambda batches: batches,
        "for batch in step.prefetch(loader, 2)": lambda batches: step.prefetch(batches, 2),
    }
    return [[f"`{name}`", *_loop(step, way(_loader(steps + 3)))] for name, way in ways.items()]


def _loader(number: int) -> Iterator[np.ndarray]:
    """Batches of 256 rows, each of which takes its time."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        began = time.perf_counter()
        batch = rng.normal(size=(256, 64)).astype(np.float32)
        time.sleep(max(0.0, began + _LOADER - time.perf_counter()))
        yield batch


def _loop(step: crossshard.TrainStep, batches: Iterable[Any]) -> list[str]:
    """The cells of a loop, without its first steps, which compile."""
    state, times = step.init(np.zeros((64, 8), np.float32)), list[float]()
    for batch in batches:
        began = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        time.sleep(max(0.0, began + _STEP - time.perf_counter()))
        times.append(time.perf_counter())
    each = [1000 * (b - a) for a, b in itertools.pairwise(times[2:])]
    figures = (statistics.median(each), min(each), max(each))
    left = sum(each.name == "crossshard" for each in threading.enumerate())
    return [*(f"{figure:.1f}" for figure in figures), f"{left}"]


if __name__ == "__main__":
    markdown.command(main)
