"""Benchmark of sharded parameters: ours and GSPMD's against replicated ones, in time and bytes."""

import functools

from benchmarks.jax_baselines import JaxCandidate, gspmd, hand_written, ours
from benchmarks.models import scanned
from benchmarks.problem import Problem
from benchmarks.step import NamedProblem, compared


def problems(quick: bool) -> list[NamedProblem]:
    """A scanned model."""
    small = {"layers": 2, "width": 128} if quick else {}
    return [("a scanned MLP", functools.partial(scanned, **small))]


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


measure = compared("parts", problems, make_candidates, _bytes)
