"""The stateful idiom: variables, their slots and gradients, and the runners of a step.

From ``CrossShardOptimizer.minimize`` to new values, in eight files: ``names`` finds the variables
and what they are called, ``differentiate`` returns this shard's gradients, ``computed`` knows that
they are from here, ``making`` makes the slots that are missing, ``slots`` gives the optimizer's
state over these variables as an Optax state, ``optimizer.transformation`` passes both through the
``pipeline``, as in the Optax idiom, and ``optimizer.cross_shard_optimizer`` writes the values.
Around it, ``runners`` finds what a step was given (``graph``), ``program`` traces it once per shard
with that bound (``binding``), and compiles it; ``arrays`` is what is split and joined, ``keys``
says when a program fits again, and ``per_shard`` is what differs between shards.
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
