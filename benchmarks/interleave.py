"""Interleaved timing: in every round each candidate takes a few steps while the others idle.

Other load on the machine varies over seconds and affects all candidates of a round alike. Ratios
are therefore taken within rounds, and times of different runs are never compared.
"""

from collections.abc import Callable, Sequence

from benchmarks.baselines import Candidate
from benchmarks.timing import Timing

# The first compiles or allocates; the second takes the state of the first.
_WARM_UP = 2
# Untimed steps at the start of a turn: the turn before leaves its own data in the caches and
# frees memory, so the first step is slower.
_LEAD_IN = 1
# A turn of the fastest lasts about this long.
_TURN_SECONDS = 0.25
_MOST_STEPS = 500


def interleave(
    candidates: Sequence[Candidate], rounds: int, show: Callable[[int], None]
) -> tuple[Timing, dict[str, float]]:
    """Time the candidates over this many rounds, after a warm-up that is not timed.

    Args:
      candidates: the candidates in the order of turns; the first is the reference.
      rounds: the number of rounds.
      show: called with the number of every finished round.

    Returns:
      The times, and the largest difference of each candidate's parameters from the first one's
      after the same few steps.
    """
    samples = {candidate.name: candidate.run(_WARM_UP).sample for candidate in candidates}
    first = next(iter(samples.values()))
    differences = {
        name: max((abs(one - other) for one, other in zip(first, sample, strict=True)), default=0.0)
        for name, sample in samples.items()
    }
    fastest = min(candidate.run(_WARM_UP).seconds / _WARM_UP for candidate in candidates)
    steps = min(_MOST_STEPS, max(1, round(_TURN_SECONDS / fastest)))
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for number in range(1, rounds + 1):
        for candidate in candidates:
            candidate.run(_LEAD_IN)
            seconds[candidate.name].append(candidate.run(steps).seconds / steps)
        show(number)
    return Timing(steps, seconds), differences
