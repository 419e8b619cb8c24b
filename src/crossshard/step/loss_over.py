"""LossOver: what the loss of a step is a mean over, and what a loss over the batch rules out."""

import enum

from crossshard import _check


class LossOver(enum.StrEnum):
    """What the loss is given, and so what it is a loss of.

    ROWS: each shard's rows; it is a mean over rows, so that the mean over the shards is that of
      the batch.
    SHARD: each shard's rows; each shard's own loss is meant, whatever it does with its rows.
    BATCH: all rows of the batch, as global arrays, whose work XLA splits.

    >>> LossOver("batch")
    <LossOver.BATCH: 'batch'>
    """

    ROWS = "rows"
    SHARD = "shard"
    BATCH = "batch"


def check_loss_over(loss_over: object) -> LossOver:
    """The checked ``loss_over`` argument, or an ArgumentError that lists the values."""
    return _check.choice("loss_over", loss_over, LossOver)
