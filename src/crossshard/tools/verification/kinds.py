"""The kinds of faults that ``verify`` tells apart, and the factors that it knows by name."""

import math

# Updates.
SUMMED = "summed"
SUMMED_TWICE = "summed twice"
AVERAGED_TWICE = "averaged twice"
SUM_AVERAGED = "sum averaged"
MICROBATCHES = "microbatches"
SCALED_BY_ROWS = "scaled by rows"
SCALED = "scaled"
GROUP_SIZE = "divided by another group size"
LOCAL_NORM = "local norm"
NOT_UPDATED = "not updated"
NOT_REDUCED = "not reduced"
SHARD_DIFFERS = "shard differs"
ONE_SHARD = "one shard's gradient"
ROWS_DROPPED = "rows dropped"
ROWS_REPEATED = "rows used twice"
WEIGHTS = "uneven weights"
GROUPS_IGNORED = "groups ignored"
IN_GROUPS = "reduced in groups"
NOT_LINEAR = "not linear"
LOW_PRECISION = "low precision"
OTHER = "another direction"
# Everything else.
BATCH_NOT_SPLIT = "batch not split"
KEYS_EQUAL = "equal random keys"
COUNTER = "counter"
STATISTICS = "statistics"
METRIC_ONE_SHARD = "metric of one shard"
METRIC_SUMMED = "metric summed"
METRIC_AVERAGED = "metric averaged twice"

_SUMMED = "summed over the shards, not averaged; or a pmean came after autodiff had summed"
_LOCAL_NORM = "clipped or normalised by a local norm"
_MAY_BE = "which may be the number of microbatches"

# How far a factor may be from one that has a name.
NEAR = 5e-3


def near(ratio: float, wanted: float, within: float = NEAR) -> bool:
    """Whether two positive factors are equal, up to rounding."""
    return ratio > 0 and abs(math.log(ratio / wanted)) <= math.log1p(within)


def name_ratio(
    ratio: float, number: int, rows: int, of_all: int, within: float = NEAR
) -> tuple[str, str]:
    """The kind of a factor, and its words.

    Args:
      ratio: the update on N shards over that on one device.
      number: N, or the shards of a group.
      rows: the rows of the batch, or of a group's part of it.
      of_all: the number of shards in all groups.
      within: how far the ratio may be from one that has a name.

    >>> name_ratio(8.0, 8, 64, 8)[1]
    '8.000 = N: summed over the shards, not averaged; or a pmean came after autodiff had summed'
    """
    if ratio < 0:
        return SCALED, f"{ratio:.3f}: it goes the other way"
    n, part = number, rows / number
    known = [
        (n, "N", SUMMED, _SUMMED),
        (1 / n, "1/N", AVERAGED_TWICE, "averaged twice"),
        (n * n, "N²", SUMMED_TWICE, "summed twice, and never averaged"),
        (1 / n**2, "1/N²", AVERAGED_TWICE, "averaged three times"),
        (math.sqrt(n), "√N", LOCAL_NORM, _LOCAL_NORM),
        (1 / math.sqrt(n), "1/√N", LOCAL_NORM, _LOCAL_NORM),
        (rows, "the rows of the batch", SCALED_BY_ROWS, "a sum over rows, not a mean"),
        (1 / rows, "1/rows", SCALED_BY_ROWS, "divided by the rows once too often"),
        (part, "the rows of a shard", SCALED_BY_ROWS, "scaled by the rows of each shard"),
        (1 / part, "1/rows of a shard", SCALED_BY_ROWS, "divided by the rows of a shard too often"),
    ]
    if of_all != n:
        known = [
            (n / of_all, "n/N", GROUP_SIZE, f"the sum of {n} shards was divided by all {of_all}"),
            (of_all, "N", GROUP_SIZE, f"summed over all {of_all} shards, not averaged in groups"),
            *known,
        ]
    few = [
        entry
        for k in range(2, 33)
        for entry in (
            (1 / k, f"1/{k}", MICROBATCHES, f"divided by {k} once too often, {_MAY_BE}"),
            (
                k,
                f"{k}",
                MICROBATCHES,
                f"{k} times too large, as a sum of {k} microbatches would be",
            ),
        )
    ]
    likely = [each for each in (known if n > 1 else []) + few if near(ratio, each[0], within)]
    if not likely or near(ratio, 1):
        return SCALED, f"{ratio:.3f}: scaled by a factor that has no name here"
    _, sign, kind, words = min(likely, key=lambda each: abs(math.log(ratio / each[0])))
    return kind, f"{ratio:.3f} = {sign}: {words}"
