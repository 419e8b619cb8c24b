"""Which options of a step rule each other out: what each needs, and what each way to step lacks."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from crossshard import _check
from crossshard.collectives.few_bits import Codec
from crossshard.errors import ArgumentError
from crossshard.gradients.status import Reduction
from crossshard.model.model_state import ModelState
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stages.metrics import need_local
from crossshard.pipeline.update.plan import Rest, WeightUpdate
from crossshard.step.losses.loss import LossOver
from crossshard.step.microbatches import AuxReduction


class Needs(enum.Flag):
    """What an option needs or does, and a way to step may lack or not allow.

    LOSS: each shard has a loss of its own.
    GRADIENT: each shard's own gradient, before any sum.
    STATE: each shard, or group, keeps something of its own.
    SENT: the step itself sends gradients, or slices of parameters.
    ROUNDED: what a shard sends is rounded.
    SPLIT: XLA splits work over devices.
    WHOLE: each shard has all parameters.
    COMMON: all shards have the same parameters.
    UNTOUCHED: nothing but an update of the optimizer changes parameters.
    """

    LOSS = enum.auto()
    GRADIENT = enum.auto()
    STATE = enum.auto()
    SENT = enum.auto()
    ROUNDED = enum.auto()
    SPLIT = enum.auto()
    WHOLE = enum.auto()
    COMMON = enum.auto()
    UNTOUCHED = enum.auto()


class Option(NamedTuple):
    """An option that some ways to step rule out.

    Attributes:
      is_asked: whether the step has it.
      needs: what it needs, or does.
      what: that, in words.
      instead: what to write; ``None`` for what the way says.
    """

    is_asked: bool
    needs: Needs
    what: str
    instead: str | None = None


class Way(NamedTuple):
    """A way to step that rules options out.

    Attributes:
      is_asked: whether the step has it.
      lacks: what it lacks, or does not allow.
      why: the reason, in words.
      instead: what to write if an option does not say it.
    """

    is_asked: bool
    lacks: Needs
    why: str
    instead: str = "Leave one of them out."


def check_together(
    pipeline: Pipeline,
    *,
    other_axes: Sequence[str],
    params: Rest,
    update: WeightUpdate,
    gather_dtype: Any,
    loss_over: LossOver,
    virtual_shards: int | None,
    weight: Any,
    model_state: ModelState | None,
    aux_reduction: Any,
) -> None:
    """Raise if a step has an option that needs what its way to step lacks.

    Args:
      pipeline: the pipeline of the step.
      other_axes: the other axes of the mesh.
      params: the step's arguments, checked, like all that follow.

    Raises:
      ArgumentError: it says of both what they do, and what to write instead.
    """
    local = [name for name in pipeline.metrics if need_local((name,))]
    groups, nonfinite, dtype = pipeline.groups, pipeline.nonfinite, pipeline.reduce_dtype
    workers = pipeline.joins_groups
    ways = (
        Way(
            workers,
            Needs.COMMON | Needs.UNTOUCHED,
            "with sync_every each worker has its own parameters and trains alone",
        ),
        Way(
            params is Rest.SHARDED,
            Needs.WHOLE,
            "with params='sharded' each shard has its slice of them alone",
        ),
        Way(
            groups is not None,
            Needs.COMMON,
            f"with group_assignment {groups} each group has its own parameters",
        ),
        Way(
            virtual_shards is not None,
            Needs.GRADIENT | Needs.STATE | Needs.SENT | Needs.ROUNDED | Needs.SPLIT,
            f"with virtual_shards={virtual_shards} the parameters are not to depend on the number "
            f"of shards",
        ),
        Way(
            loss_over is LossOver.BATCH,
            Needs.LOSS | Needs.GRADIENT | Needs.STATE | Needs.SENT,
            "with loss_over='batch' there is one loss, of the whole batch",
            "Leave it out, or write loss_over='shard'.",
        ),
    )
    options = (
        Option(
            loss_over is LossOver.BATCH,
            Needs.SPLIT,
            "loss_over='batch' is one loss of all rows, whose work XLA splits in another way for "
            "each number of shards",
            "Write loss_over='rows'.",
        ),
        Option(
            workers,
            Needs.STATE,
            "sync_every lets each worker train alone, and there are as many as shards or groups",
        ),
        Option(
            params is Rest.SHARDED,
            Needs.COMMON,
            "params='sharded' splits one set of parameters over all shards",
            "Leave it out; weight_update='sharded' splits the update over the shards that have the "
            "same parameters.",
        ),
        Option(
            update is WeightUpdate.REPLICATED,
            Needs.WHOLE,
            "weight_update='replicated' lets each shard update all parameters",
            "Leave weight_update out.",
        ),
        Option(
            pipeline.master_dtype is not None,
            Needs.UNTOUCHED,
            f"master_dtype={str(pipeline.master_dtype)!r} keeps parameters that a synchronisation "
            f"would not reach",
            "Pass parameters of 32 bits that the loss converts.",
        ),
        Option(
            pipeline.ema is not None,
            Needs.UNTOUCHED,
            "ema averages the parameters of one worker, which a synchronisation replaces",
            "Leave it out, and evaluate model(state), which is of all workers.",
        ),
        Option(
            weight is not None,
            Needs.LOSS,
            f"weight={_check.shown(weight)} weighs the shards' means",
            "Weigh the rows in the loss: (w * losses).sum() / w.sum() is that of all rows.",
        ),
        Option(
            pipeline.preprocess is not None,
            Needs.GRADIENT,
            "preprocess= runs on each shard's own gradient",
            "Put it before the optimizer: optax.chain(preprocess, optimizer) gets the gradient of "
            "the batch.",
        ),
        Option(
            nonfinite is not None and nonfinite.excludes_shards,
            Needs.GRADIENT,
            "nonfinite='quarantine' leaves out shards whose own gradient is not finite",
            "Write nonfinite='skip'.",
        ),
        Option(
            bool(local),
            Needs.GRADIENT,
            f"metrics has {', '.join(map(repr, local))}, of each shard's own gradient",
            "Leave it out.",
        ),
        Option(
            groups is not None,
            Needs.STATE,
            f"group_assignment {groups} gives each group of shards a loss and parameters of its "
            f"own",
        ),
        Option(
            model_state is ModelState.PER_SHARD,
            Needs.STATE,
            "model_state='per_shard' keeps one state for each shard",
            "Write model_state='mean', which keeps one for all.",
        ),
        Option(
            AuxReduction.PER_SHARD in jax.tree.leaves(aux_reduction),
            Needs.LOSS,
            "aux_reduction='per_shard' keeps what each shard's loss returns",
            "Leave it out: aux is kept as the loss returns it.",
        ),
        Option(
            pipeline.reduction is Reduction.SUM,
            Needs.LOSS,
            "reduction='sum' adds up the shards' losses",
            "Use reduction='mean', and a loss that is a sum where you want one.",
        ),
        Option(
            pipeline.aggregator is not None,
            Needs.SENT,
            f"The gradients would be summed {pipeline.sums_by.describe()}, from each shard's own",
            "Leave aggregator and reduce_dtype out.",
        ),
        Option(
            dtype is not None,
            Needs.SENT,
            f"reduce_dtype={str(dtype)!r} rounds the gradients that each shard sends",
            "Leave it out; a loss that computes in bfloat16 is differentiated in it.",
        ),
        Option(
            gather_dtype is not None,
            Needs.ROUNDED,
            f"gather_dtype={str(gather_dtype)!r} rounds the parameters that several shards send",
            "Leave one of them out; the loss may convert them to 16 bits itself.",
        ),
        Option(
            isinstance(gather_dtype, Codec),
            Needs.SENT,
            f"gather_dtype={str(gather_dtype)!r} is written in blocks by each shard",
            "Pass a dtype such as bfloat16, or loss_over='shard'.",
        ),
        Option(
            bool(other_axes),
            Needs.SPLIT,
            f"The mesh has other axes, {', '.join(other_axes)}, over which XLA splits the work of "
            f"each shard, and adds what it likes",
            "Pass a mesh of the shards alone.",
        ),
    )
    for way in filter(lambda way: way.is_asked, ways):
        for option in filter(lambda option: option.is_asked, options):
            if option.needs & way.lacks:
                raise ArgumentError(f"{option.what}; {way.why}. {option.instead or way.instead}")
