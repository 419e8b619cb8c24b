"""The stateful idiom: an optimizer that writes variables, and the runners of a step.

From ``minimize`` to new values: ``optimizer`` has the methods and this shard's gradients, ``slots``
finds what is trained, by name, and is the optimizer's state over these variables as an Optax state,
and ``optimizer/transformation`` updates both, as in the Optax idiom. Around it, ``runners`` splits
the arrays, ``program`` finds what a step was given, traces it once per shard, compiles it and joins
its outputs, and ``per_shard`` is what differs between shards.
"""

from crossshard.nnx.per_shard import (
    PerShardArray,
    is_per_shard,
    merge_shards,
    set_per_shard,
    set_shared,
)
from crossshard.nnx.runners import ShardedFunction, batch_parallel, replicate, rewrite, shard

__all__ = [
    "PerShardArray",
    "ShardedFunction",
    "batch_parallel",
    "is_per_shard",
    "merge_shards",
    "replicate",
    "rewrite",
    "set_per_shard",
    "set_shared",
    "shard",
]
