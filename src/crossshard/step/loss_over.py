"""LossOver: what the loss of a step is a mean over, and what a loss over the batch rules out."""

import enum
from typing import Any

import jax

from crossshard import _check
from crossshard.errors import ArgumentError
from crossshard.gradients.reduction import Reduction
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stages.metrics import need_local
from crossshard.step.aux_reduction import AuxReduction


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


def check_over_batch(
    pipeline: Pipeline, *, weight: Any, model_state: Any, aux_reduction: Any
) -> None:
    """Raise if a step with a loss over the batch is to do what needs a shard's own gradient.

    Args:
      pipeline: the pipeline of the step.
      weight: the step's arguments, like ``model_state`` and ``aux_reduction``.

    Raises:
      ArgumentError: it names the option, and says what to write instead.
    """
    reductions = jax.tree.leaves(aux_reduction)
    local = [name for name in pipeline.metrics if need_local((name,))]
    groups, nonfinite, dtype = pipeline.groups, pipeline.nonfinite, pipeline.reduce_dtype
    refused = (
        (
            weight is not None,
            f"weight={_check.shown(weight)} weighs the shards' means",
            "Weigh the rows in the loss: (w * losses).sum() / w.sum() is that of all rows.",
        ),
        (
            pipeline.preprocess is not None,
            "preprocess= runs on each shard's own gradient",
            "Put it before the optimizer: optax.chain(preprocess, optimizer) gets the gradient of "
            "the batch.",
        ),
        (
            nonfinite is not None and nonfinite.excludes_shards,
            "nonfinite='quarantine' leaves out shards whose own gradient is not finite",
            "Write nonfinite='skip'.",
        ),
        (
            groups is not None,
            f"group_assignment {groups} gives each group of shards a loss of its own",
            "Leave it out, or write loss_over='shard'.",
        ),
        (
            model_state == "per_shard",
            "model_state='per_shard' keeps one state for each shard",
            "Write model_state='mean': the loss returns one state, which is kept as it is.",
        ),
        (
            AuxReduction.PER_SHARD in reductions,
            "aux_reduction='per_shard' keeps what each shard's loss returns",
            "Leave it out: aux is kept as the loss returns it.",
        ),
        (
            pipeline.reduction is Reduction.SUM,
            "reduction='sum' adds up the shards' losses",
            "Use reduction='mean', and a loss that is a sum where you want one.",
        ),
        (
            bool(local),
            f"metrics has {', '.join(map(repr, local))}, of each shard's own gradient",
            "Leave it out.",
        ),
        (
            pipeline.aggregator is not None,
            f"The gradients would be summed {pipeline.sums_by.describe()}, from each shard's own",
            "Leave aggregator and reduce_dtype out.",
        ),
        (
            dtype is not None,
            f"reduce_dtype={str(dtype)!r} is that in which shards send their gradients, and here "
            f"XLA sums them as the loss computes them",
            "Leave it out; a loss that computes in bfloat16 is differentiated in it.",
        ),
    )
    for is_asked, what, instead in refused:
        if is_asked:
            raise ArgumentError(
                f"{what}; with loss_over='batch' there is one loss, of the whole batch. {instead}"
            )
