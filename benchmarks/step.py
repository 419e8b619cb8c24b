"""Benchmark of whole steps, with forward and backward: ours against one written by hand."""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence

from benchmarks.interleave import interleave
from benchmarks.jax_baselines import hand_written, ours
from benchmarks.machine import free_memory
from benchmarks.models import mlp, transformer
from benchmarks.options import BenchOptions
from benchmarks.problem import Problem
from benchmarks.progress import Screen
from benchmarks.result import Result

TRANSFORMER = "the demo's transformer"

_SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)
_QUICK_SIZES = (1_000, 10_000)


def measure(options: BenchOptions, screen: Screen) -> Iterator[Result]:
    """A result for every size of MLP and for the transformer, with every number of shards."""
    for name, make in problems(options.quick):
        for shards in options.shards_for("step"):
            problem = make(shards)
            count = f"{shards} shard{'s' * (shards > 1)}"
            told = f"step of {problem.parameters:,} parameters ({name}), {count}"
            needed, free = _needed_bytes(problem.parameters, shards), free_memory()
            if needed > free:
                screen.note(
                    f"Left out: {told}, which needs {needed / 2**30:.0f} GiB where "
                    f"{free / 2**30:.0f} are free."
                )
                continue
            screen.tell(f"{told}: compiling")
            candidates = [
                ours(problem, shards, "auto"),
                ours(problem, shards, "sharded"),
                ours(problem, shards, "replicated"),
                hand_written(problem, shards),
            ]
            screen.tell(told)
            timing, differences = interleave(candidates, options.rounds, screen.round)
            # Free memory for the next candidates. Compiled functions are in reference cycles,
            # which only a collection frees.
            del candidates
            gc.collect()
            yield Result(name, problem.parameters, shards, timing, differences)


def problems(
    quick: bool, sizes: Sequence[int] = _SIZES
) -> Iterator[tuple[str, Callable[[int], Problem]]]:
    """The transformer, and MLPs of these sizes: names, and functions from a number of shards."""
    small = {"layers": 1, "width": 32} if quick else {}
    yield TRANSFORMER, functools.partial(transformer, **small)
    for size in _QUICK_SIZES if quick else sizes:
        yield "MLP", functools.partial(mlp, size)


def _needed_bytes(parameters: int, shards: int) -> int:
    """Parameters and moments of all four candidates, gradients and updates of the one that runs."""
    replicated, sharded = 3 * shards, shards + 2
    return (2 * replicated + 2 * sharded + 2 * shards) * parameters * 4
