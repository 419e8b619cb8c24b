"""Reduction: mean or sum over the shards."""

import enum

from crossshard import _check
from crossshard.errors import ArgumentError


class Reduction(enum.StrEnum):
    """How values are reduced, with TensorFlow's names and string values.

    An optimizer takes SUM and MEAN, also as ``"sum"`` and ``"mean"``.

    >>> Reduction.MEAN == "weighted_mean"
    True
    """

    NONE = "none"
    SUM = "weighted_sum"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    MEAN = "weighted_mean"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"
    SUM_OVER_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"


_ACCEPTED = {
    "weighted_sum": Reduction.SUM,
    "sum": Reduction.SUM,
    "weighted_mean": Reduction.MEAN,
    "mean": Reduction.MEAN,
}


def check_reduction(reduction: object) -> Reduction:
    """SUM or MEAN, or an ArgumentError that names both and what was received."""
    accepted = _ACCEPTED.get(reduction) if isinstance(reduction, str) else None
    if accepted is None:
        raise ArgumentError(
            f"reduction must be Reduction.SUM ('weighted_sum', or 'sum') or Reduction.MEAN "
            f"('weighted_mean', or 'mean'); received "
            f"{_check.shown(reduction, 80)}."
        )
    return accepted
