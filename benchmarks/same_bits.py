"""Benchmark of virtual shards: the same bits at any number of shards, against the plain step."""

from collections.abc import Iterator

from benchmarks import dealt
from benchmarks.jax_baselines import JaxCandidate, ours
from benchmarks.options import BenchOptions
from benchmarks.problem import Problem
from benchmarks.progress import Screen
from benchmarks.result import Result
from benchmarks.step import compared, problems, sent

VIRTUAL = 8

_SIZES = (1_000_000,)
_NOT_ELEMENTWISE = ("Muon, 24 matrices", "AdamW behind a clip by the global norm")


def measure(options: BenchOptions, screen: Screen, versions: dict[str, str]) -> Iterator[Result]:
    """A result for every problem, with every number of shards."""
    del versions  # of peers
    sizes = [*problems(options.quick, _SIZES)]
    # Whole matrices on one shard each, and a norm that all read.
    of_matrices = dict(dealt.problems(options.quick))
    sizes += [(name, of_matrices[name]) for name in _NOT_ELEMENTWISE]
    # Rows for every virtual shard.
    return compared("same_bits", options, screen, sizes, make_candidates, sent, parts=VIRTUAL)


def make_candidates(problem: Problem, shards: int) -> list[JaxCandidate]:
    """Steps with virtual shards, the plain ones, and the plain ones in as small pieces."""
    found, pieces = [], VIRTUAL // shards
    for named, options in (
        (f"{VIRTUAL} virtual shards", {"virtual_shards": VIRTUAL}),
        (f"in {pieces} microbatches", {"accumulate_steps": pieces}),
        ("", {}),
    ):
        for weight_update in ("sharded", "replicated"):
            candidate = ours(problem, shards, weight_update, **options)
            candidate.name += f", {named}" if named else ""
            found.append(candidate)
    # With one piece for each shard they are the plain ones.
    return found if pieces > 1 else found[:2] + found[4:]
