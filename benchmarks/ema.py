"""Benchmark of a moving average of the parameters: in parts against whole, and without it."""

import gc
from collections.abc import Iterator

from benchmarks.interleave import interleave
from benchmarks.jax_baselines import JaxCandidate, hand_written, ours
from benchmarks.options import BenchOptions
from benchmarks.problem import Problem
from benchmarks.progress import Screen
from benchmarks.result import Result
from benchmarks.step import problems

DECAY = 0.999

_SIZES = (1_000_000, 10_000_000)


def measure(options: BenchOptions, screen: Screen) -> Iterator[Result]:
    """A result for the transformer and for MLPs, with every number of shards."""
    for name, make in problems(options.quick, _SIZES):
        for shards in options.shards_for("ema"):
            problem = make(shards)
            name_and_size = f"{name} of {problem.parameters:,} parameters"
            told = f"moving average, {name_and_size}, {shards} shards"
            screen.tell(f"{told}: compiling")
            both = (make_candidates(problem, shards, decay) for decay in (DECAY, None))
            # One after the other, since other load varies least between turns that are near.
            candidates = [each for pair in zip(*both, strict=True) for each in pair]
            held = {candidate.name: candidate.bytes_held() for candidate in candidates}
            screen.tell(told)
            timing, differences = interleave(candidates, options.rounds, screen.round)
            # Free memory for the next candidates, as in the benchmark of steps.
            del candidates
            gc.collect()
            yield Result(name_and_size, problem.parameters, shards, timing, differences, held=held)


def make_candidates(problem: Problem, shards: int, decay: float | None) -> list[JaxCandidate]:
    """Steps that keep an average, or that do not if ``decay`` is ``None``."""
    candidates = [
        ours(problem, shards, "sharded", ema=decay),
        ours(problem, shards, "replicated", ema=decay),
        hand_written(problem, shards, ema=decay),
    ]
    if decay is None:
        for candidate in candidates:
            candidate.name = without_average(candidate.name)
    return candidates


def without_average(name: str) -> str:
    """The name of the same candidate without an average."""
    return f"{name}, no average"
