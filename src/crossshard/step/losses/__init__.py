"""Losses of a step: over the rows of shards, the whole batch, or virtual shards."""

import dataclasses
from typing import Any

from crossshard import _check
from crossshard.errors import ArgumentError
from crossshard.step.losses.batch import BatchLoss
from crossshard.step.losses.loss import LossOver, StepLoss
from crossshard.step.losses.rows import RowsLoss
from crossshard.step.losses.virtual import VirtualLoss


def loss_over(over: LossOver, *, virtual_shards: int | None = None, **fields: Any) -> StepLoss:
    """Return the loss of a step, given what it is over and its other fields."""
    kind: type[StepLoss] = BatchLoss if over is LossOver.BATCH else RowsLoss
    if virtual_shards is not None:
        kind = VirtualLoss
    return kind(over=over, virtual_shards=virtual_shards, **fields)


def changed(loss: StepLoss, **fields: Any) -> StepLoss:
    """Return a loss with other values of some fields."""
    own = {each.name: getattr(loss, each.name) for each in dataclasses.fields(loss)}
    return loss_over(**own | fields)


def check_virtual_shards(given: Any, shards: int) -> int | None:
    """Return the checked number of virtual shards on so many shards; ``None`` without them."""
    if given is None:
        return None
    number = _check.whole_number("virtual_shards", given)
    if number < shards:
        raise ArgumentError(
            f"virtual_shards={number} are divided over the shards, and there are {shards}, of "
            f"which some would have none. Pass at least {shards}, or at most num_shards={number}."
        )
    return number


def written(loss: StepLoss) -> dict[str, Any]:
    """Return what a checkpoint stores of a loss, and a restore compares, by the options' names."""
    return {
        "weight": loss.weight_fn,
        "accumulate_steps": loss.accumulate_steps,
        "model_state": loss.model_state,
        "loss_over": loss.over,
        "rng_per='row'": loss.key_per_row,
        "virtual_shards": loss.virtual_shards,
    }
