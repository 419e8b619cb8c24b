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


def with_workers(pipeline: Pipeline, outer: Outer, shards: int) -> Pipeline:
    """A pipeline whose groups are workers: each shard is one if there are no groups."""
    alone = GroupAssignment(tuple((shard,) for shard in range(shards)))
    return dataclasses.replace(pipeline, groups=pipeline.groups or alone, outer=outer)
