"""Rarely: workers that train alone for some steps and then become one again."""

import dataclasses
from typing import Any

import optax

from crossshard import _check
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.optimizer.cross_shard_optimizer import CrossShardOptimizer
from crossshard.optimizer.transformation import check_transformation
from crossshard.pipeline.aggregators.few_bits import FewBits
from crossshard.pipeline.aggregators.plain import Plain
from crossshard.pipeline.options import check_reduce_dtype
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stages.outer import Outer
from crossshard.pipeline.stages.streaming import Streaming
from crossshard.shards.groups import GroupAssignment
from crossshard.step.shard_loss import ShardLoss


def check_outer(
    sync_every: Any, outer_optimizer: Any, outer_reduce_dtype: Any, *, sync_streaming: Any
) -> Outer | None:
    """The stage of these arguments; ``None`` without ``sync_every``.

    Raises:
      ArgumentError: not a positive number, a dtype that is none, or the others without it.
      ArgumentTypeError: not a whole number, no Optax optimizer, or no bool.
    """
    streaming = _check.flag("sync_streaming", sync_streaming)
    if sync_every is None:
        given = {
            "outer_optimizer": outer_optimizer is not None,
            "outer_reduce_dtype": outer_reduce_dtype is not None,
            "sync_streaming": streaming,
        }
        for name, is_given in given.items():
            if is_given:
                raise ArgumentError(
                    f"{name} is for workers that train alone for some steps. Say for how many: "
                    f"sync_every=20, or leave {name} out."
                )
        return None
    every = _check.whole_number("sync_every", sync_every, hint="It counts steps, such as 20.")
    if isinstance(outer_optimizer, CrossShardOptimizer):
        raise ArgumentTypeError(
            "outer_optimizer updates with the mean over the workers, so it reduces nothing itself. "
            "Pass the Optax optimizer without CrossShardOptimizer."
        )
    # The mean of the parameters is that of a rate of 1.
    found = optax.sgd(1.0) if outer_optimizer is None else outer_optimizer
    found = optax.with_extra_args_support(check_transformation(found, "outer_optimizer"))
    wire = check_reduce_dtype(outer_reduce_dtype, "outer_reduce_dtype", by_axis=False)
    kind = Streaming if streaming else Outer
    return kind(every, found, wire if isinstance(wire, FewBits) else Plain(wire))


def check_workers(pipeline: Pipeline, *, params: str, loss: ShardLoss) -> None:
    """Raise if a step with ``sync_every`` is to do what workers on their own do not do.

    Raises:
      ArgumentError: it names the option, and says what to write instead.
    """
    refused = (
        (
            loss.is_over_batch,
            "loss_over='batch' is one loss of all shards, so that no worker has one of its own",
            "Write loss_over='shard'.",
        ),
        (
            params == "sharded",
            "params='sharded' splits one set of parameters over all shards, and each worker has "
            "its own",
            "Leave it out; weight_update='sharded' splits the update over the shards of a worker.",
        ),
        (
            pipeline.master_dtype is not None,
            f"master_dtype={str(pipeline.master_dtype)!r} keeps parameters that a synchronisation "
            f"would not reach",
            "Pass parameters of 32 bits that the loss converts.",
        ),
        (
            pipeline.ema is not None,
            "ema averages the parameters of one worker, which a synchronisation replaces",
            "Leave it out, and evaluate model(state), which is of all workers.",
        ),
    )
    for is_asked, what, instead in refused:
        if is_asked:
            raise ArgumentError(f"With sync_every each worker trains alone: {what}. {instead}")


def with_workers(pipeline: Pipeline, outer: Outer, shards: int) -> Pipeline:
    """A pipeline whose groups are workers: each shard is one if there are no groups."""
    alone = GroupAssignment(tuple((shard,) for shard in range(shards)))
    return dataclasses.replace(pipeline, groups=pipeline.groups or alone, outer=outer)
