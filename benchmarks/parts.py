"""Benchmark of sharded parameters: ours and GSPMD's against replicated ones, in time and bytes."""

import functools
from collections.abc import Iterator

from benchmarks.jax_baselines import JaxCandidate, gspmd, hand_written, ours
from benchmarks.models import scanned
from benchmarks.options import BenchOptions
from benchmarks.problem import Problem
from benchmarks.progress import Screen
from benchmarks.result import Result
from benchmarks.step import compared


def measure(options: BenchOptions, screen: Screen, versions: dict[str, str]) -> Iterator[Result]:
    """A result for a scanned model, with every number of shards."""
    del versions  # of peers
    small = {"layers": 2, "width": 128} if options.quick else {}
    problems = [("a scanned MLP", functools.partial(scanned, **small))]
    return compared("parts", options, screen, problems, make_candidates, _bytes)


def make_candidates(problem: Problem, shards: int) -> list[JaxCandidate]:
    """Sharded and replicated parameters, ours and others'."""
    return [
        ours(problem, shards, "sharded", params="sharded"),
        ours(problem, shards, "sharded"),
        ours(problem, shards, "replicated"),
        hand_written(problem, shards),
        gspmd(problem, shards),
    ]


def _bytes(candidates: list[JaxCandidate]) -> dict[str, dict[str, int]]:
    return {
        "held": {each.name: each.bytes_held() for each in candidates},
        "of_parameters": {each.name: each.bytes_of_parameters() for each in candidates},
    }
