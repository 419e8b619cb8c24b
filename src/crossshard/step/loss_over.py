"""LossOver: what the loss of a step is a mean over; and what has random keys of its own."""

import enum

from crossshard import _check
from crossshard.errors import ArgumentError


class LossOver(enum.StrEnum):
    """What the loss is given, and so what it is a loss of.

    ROWS: each shard's rows; it is proven to be a mean over rows, so that the mean over the shards
      is that of the batch.
    BATCH: all rows of the batch, as global arrays, whose work XLA splits.
    SHARD: each shard's rows; each shard's own loss is meant, whatever it does with its rows.

    >>> LossOver("batch")
    <LossOver.BATCH: 'batch'>
    """

    ROWS = "rows"
    BATCH = "batch"
    SHARD = "shard"


class RngPer(enum.StrEnum):
    """What has a random key of its own in a step.

    SHARD: each shard, so that noise depends on the number of shards; with a loss over the batch
      there is one key.
    ROW: each row, by its place in the global batch, so that noise depends on nothing else.

    >>> RngPer("row")
    <RngPer.ROW: 'row'>
    """

    SHARD = "shard"
    ROW = "row"


def check_rng_per(rng_per: object, *, takes_rng: bool) -> RngPer:
    """The checked ``rng_per`` option.

    Raises:
      ArgumentError: it is unknown, or the loss takes no key.
    """
    found = _check.choice("rng_per", rng_per, RngPer)
    if found is RngPer.ROW and not takes_rng:
        raise ArgumentError(
            "rng_per='row' passes the loss a key for each row, and this one takes none. Write "
            "loss_fn(params, batch, rng), whose rng has the shape [rows]; or leave rng_per out."
        )
    return found


def check_loss_over(loss_over: object) -> LossOver:
    """The checked ``loss_over`` argument, or an ArgumentError that lists the values."""
    return _check.choice("loss_over", loss_over, LossOver)
