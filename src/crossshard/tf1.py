"""TF1: the names of ``tf.compat.v1.tpu`` that this package has too, for code that uses them."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from crossshard.collectives.cross_replica import all_to_all, collective_permute, cross_replica_sum
from crossshard.gradients.status import Reduction
from crossshard.nnx.optimizer import CrossShardOptimizer
from crossshard.nnx.runners import batch_parallel, replicate, rewrite, shard
from crossshard.shards.axes import ShardContext, get_shard_context, shard_context

__all__ = [
    "CrossShardOptimizer",
    "Reduction",
    "ShardContext",
    "TpuContext",
    "all_to_all",
    "batch_parallel",
    "collective_permute",
    "cross_replica_sum",
    "get_shard_context",
    "get_tpu_context",
    "replicate",
    "rewrite",
    "shard",
    "shard_context",
    "tpu_shard_context",
]


@dataclasses.dataclass(frozen=True)
class TpuContext:
    """The context that ``get_tpu_context`` returns.

    Attributes:
      number_of_shards: the number of shards that run the step; ``None`` outside of one.
    """

    number_of_shards: int | None


@contextmanager
def tpu_shard_context(number_of_shards: int) -> Iterator[None]:
    """Enter ``crossshard.shard_context``, under TensorFlow's name.

    Raises:
      ArgumentError, ArgumentTypeError: ``number_of_shards`` is not an int of at least 1.
      NestedContextError: a shard context is already set; a ``NotImplementedError``, as in
        TensorFlow.

    >>> with tpu_shard_context(8):
    ...     get_tpu_context().number_of_shards
    8
    """
    with shard_context(number_of_shards):
        yield


def get_tpu_context() -> TpuContext:
    """Return the context of this thread; there always is one, as in TensorFlow.

    >>> get_tpu_context()
    TpuContext(number_of_shards=None)
    """
    context = get_shard_context()
    return TpuContext(None if context is None else context.number_of_shards)
