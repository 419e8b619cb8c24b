"""Benchmark of a moving average of the parameters: sharded against replicated, and without it."""

from benchmarks.jax_baselines import JaxCandidate, hand_written, ours
from benchmarks.problem import Problem
from benchmarks.step import compared, sized

DECAY = 0.999

_WITHOUT = ", no average"


def _with_and_without(problem: Problem, shards: int) -> list[JaxCandidate]:
    both = (make_candidates(problem, shards, decay) for decay in (DECAY, None))
    # One after the other, since other load varies least between turns that are near.
    return [each for pair in zip(*both, strict=True) for each in pair]


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
    return name + _WITHOUT


def is_without_average(name: str) -> bool:
    """Whether it is the name of such a candidate."""
    return name.endswith(_WITHOUT)


def _held(candidates: list[JaxCandidate]) -> dict[str, dict[str, int]]:
    return {"held": {each.name: each.bytes_held() for each in candidates}}


measure = compared("ema", sized(1_000_000, 10_000_000), _with_and_without, _held)
