"""The stateful idiom: an optimizer that writes variables, and the runners of a step.

``optimizer`` has the methods, such as ``minimize``, and computes the gradients of one shard.
``slots`` names the variables that are trained, and keeps the optimizer's state over them as an
Optax state. ``optimizer/transformation`` updates both, as in the Optax idiom. ``runners`` splits
the arrays of a call. ``program`` finds the variables that a step was given, traces and compiles it,
and joins its outputs. ``per_shard`` holds values that differ between shards, and ``merge``
makes one of them.
"""

from crossshard.nnx.merge import merge_shards
from crossshard.nnx.per_shard import PerShardArray, is_per_shard
from crossshard.nnx.runners import ShardedFunction, batch_parallel, replicate, rewrite, shard

__all__ = [
    "PerShardArray",
    "ShardedFunction",
    "batch_parallel",
    "is_per_shard",
    "merge_shards",
    "replicate",
    "rewrite",
    "shard",
]
