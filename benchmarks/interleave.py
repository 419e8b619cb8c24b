"""Candidates in turn: in every round each takes a few steps while all the others idle.

What else the machine does comes and goes over seconds. Whatever it does to a round it does to all
candidates in it, so ratios are taken within rounds, and times of different runs never meet.
"""

from collections.abc import Callable, Sequence

from benchmarks.baselines import Candidate
from benchmarks.timing import Timing

# The first compiles or allocates; the second shows that a state is carried on.
_WARM_UP = 2
# Before the timed steps of a turn. The turn before leaves caches full of its own, and memory that
# it gave back has to be had anew: the first step pays for what another did.
_LEAD_IN = 1
# A turn of the fastest lasts about this long.
_TURN_SECONDS = 0.25
_MOST_STEPS = 500


def interleave(
    candidates: Sequence[Candidate], rounds: int, show: Callable[[int], None]
) -> tuple[Timing, dict[str, float]]:
    """Time the candidates over so many rounds, after a warm-up that is not timed.

    Args:
      candidates: in the order in which they take turns; the first one's parameters are the measure.
      rounds: how many.
      show: is given the number of every round that is over.

    Returns:
      The times, and by how much the parameters of each candidate differ from the first one's after
      the same few steps from the same start with the same gradients.
    """
    samples = {candidate.name: candidate.run(_WARM_UP).sample for candidate in candidates}
    first = next(iter(samples.values()))
    differences = {
        name: max(abs(one - other) for one, other in zip(first, sample, strict=True))
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
