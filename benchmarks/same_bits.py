"""Benchmark of virtual shards: the same bits at any number of shards, against the plain step."""

from benchmarks import dealt
from benchmarks.jax_baselines import JaxCandidate, ours
from benchmarks.problem import Problem
from benchmarks.step import NamedProblem, compared, sent, sized

VIRTUAL = 8

_NOT_ELEMENTWISE = ("Muon, 24 matrices", "AdamW behind a clip by the global norm")


def problems(quick: bool) -> list[NamedProblem]:
    """The transformer and an MLP, whole matrices on one shard each, and a norm that all read."""
    of_matrices = dict(dealt.problems(quick))
    return [*sized(1_000_000)(quick), *((name, of_matrices[name]) for name in _NOT_ELEMENTWISE)]


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


# Rows for every virtual shard.
measure = compared("same_bits", problems, make_candidates, sent, parts=VIRTUAL)
