"""Benchmarks of whole steps, with forward and backward: ours against one written by hand."""

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.interleave import interleave
from benchmarks.jax_baselines import JaxCandidate, hand_written, ours
from benchmarks.machine import free_memory
from benchmarks.models import mlp, transformer
from benchmarks.options import Bench, BenchOptions
from benchmarks.problem import Problem
from benchmarks.progress import Screen
from benchmarks.result import Result

_QUICK_SIZES = (1_000, 10_000)

Candidates = list[JaxCandidate]
NamedProblem = tuple[str, Callable[[int], Problem]]
Measure = Callable[[BenchOptions, Screen, dict[str, str]], Iterator[Result]]


def make_candidates(problem: Problem, shards: int) -> Candidates:
    """Our three ways, and the step written by hand."""
    return [
        ours(problem, shards, "auto"),
        ours(problem, shards, "sharded"),
        ours(problem, shards, "replicated"),
        hand_written(problem, shards),
    ]


def compared(
    bench: Bench,
    problems: Callable[[bool], Iterable[NamedProblem]],
    make: Callable[[Problem, int], Candidates],
    facts: Callable[[Candidates], dict[str, Any]] = lambda candidates: {},
    parts: int = 1,
) -> Measure:
    """A benchmark that has a result for every problem, with every number of shards.

    Args:
      bench: its name.
      problems: names, and functions from a number of shards; small ones if asked for.
      make: makes the candidates of a problem on so many shards.
      facts: further fields of a result, read from the candidates.
      parts: the rows of each shard divide by this number.
    """

    def measure(
        options: BenchOptions, screen: Screen, versions: dict[str, str]
    ) -> Iterator[Result]:
        del versions  # of peers
        for name, problem_of in problems(options.quick):
            for shards in options.shards_for(bench):
                problem = problem_of(parts * shards)
                title = f"{name} of {problem.parameters:,} parameters"
                told = f"{bench}, {title}, {shards} shard{'s' * (shards > 1)}"
                needed, free = _needed_bytes(problem.parameters, shards), free_memory()
                if needed > free:
                    screen.note(
                        f"Left out: {told}, which needs {needed / 2**30:.0f} GiB where "
                        f"{free / 2**30:.0f} are free."
                    )
                    continue
                screen.tell(f"{told}: compiling")
                candidates = make(problem, shards)
                found = facts(candidates)
                screen.tell(told)
                timing, differences = interleave(candidates, options.rounds, screen.round)
                # Free memory for the next candidates. Compiled functions are in reference cycles,
                # which only a collection frees.
                del candidates
                gc.collect()
                # The table of steps has a column for the parameters.
                shown = name if bench == "step" else title
                yield Result(shown, problem.parameters, shards, timing, differences, **found)

    return measure


def sized(*sizes: int) -> Callable[[bool], Iterator[NamedProblem]]:
    """The transformer, and MLPs of these sizes; small ones if asked for."""

    def problems(quick: bool) -> Iterator[NamedProblem]:
        small = {"layers": 1, "width": 32} if quick else {}
        yield "the demo's transformer", functools.partial(transformer, **small)
        for size in _QUICK_SIZES if quick else sizes:
            yield "MLP", functools.partial(mlp, size)

    return problems


def sent(candidates: Candidates) -> dict[str, Any]:
    """What each candidate sends in a step, and the least that the first one must."""
    of_each = {candidate.name: candidate.bytes_sent() for candidate in candidates}
    return {"sent": of_each, "least_sent": candidates[0].communication().lower_bound}


def _needed_bytes(parameters: int, shards: int) -> int:
    """Parameters and moments of four candidates, gradients and updates of the one that runs."""
    replicated, sharded = 3 * shards, shards + 2
    return (2 * replicated + 2 * sharded + 2 * shards) * parameters * 4


measure = compared(
    "step", sized(10_000, 100_000, 1_000_000, 10_000_000, 50_000_000), make_candidates
)
