"""TF1: the names that code for ``tf.compat.v1.tpu`` finds here, under TensorFlow's own names."""

from crossshard.collectives.all_reduce import cross_replica_sum
from crossshard.collectives.exchange import all_to_all, collective_permute
from crossshard.gradients.reduction import Reduction
from crossshard.nnx.runners import batch_parallel, replicate, rewrite, shard
from crossshard.optimizer.cross_shard_optimizer import CrossShardOptimizer
from crossshard.shards.context import ShardContext, get_shard_context, shard_context

__all__ = [
    "CrossShardOptimizer",
    "Reduction",
    "ShardContext",
    "all_to_all",
    "batch_parallel",
    "collective_permute",
    "cross_replica_sum",
    "get_shard_context",
    "replicate",
    "rewrite",
    "shard",
    "shard_context",
]
