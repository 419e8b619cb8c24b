"""What the loss of a step is over: the rows of shards, the whole batch, or virtual shards."""

import dataclasses
from typing import Any

from crossshard.step.losses.batch import BatchLoss
from crossshard.step.losses.rows import LossOver, RowsLoss, StepLoss
from crossshard.step.losses.virtual import VirtualLoss


def loss_over(over: LossOver, *, same_bits: int | None = None, **fields: Any) -> StepLoss:
    """The loss of a step, given what it is over and its other fields."""
    kind: type[StepLoss] = BatchLoss if over is LossOver.BATCH else RowsLoss
    if same_bits is not None:
        kind = VirtualLoss
    return kind(over=over, same_bits=same_bits, **fields)


def changed(loss: StepLoss, **fields: Any) -> StepLoss:
    """A loss with other values of some fields."""
    own = {each.name: getattr(loss, each.name) for each in dataclasses.fields(loss)}
    return loss_over(**own | fields)
