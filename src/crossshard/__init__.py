"""Wrap any Optax optimizer, and every shard steps correctly."""

from crossshard import distributed as distributed
from crossshard import errors
from crossshard.checkpoints.checkpoints import Checkpoints
from crossshard.collectives.all_reduce import cross_replica_sum
from crossshard.collectives.exchange import all_to_all, collective_permute
from crossshard.diagnosis import Diagnosis, doctor
from crossshard.errors import *  # noqa: F403
from crossshard.gradients.incoming import Incoming
from crossshard.gradients.local import grad, value_and_grad
from crossshard.gradients.reduction import Reduction
from crossshard.inspection import Collective, Communication, inspect
from crossshard.optimizer.cross_shard_optimizer import CrossShardOptimizer
from crossshard.optimizer.optimizer import Optimizer
from crossshard.pipeline.loss_scale import DynamicLossScale
from crossshard.pipeline.nonfinite import Nonfinite, NonfiniteState
from crossshard.pipeline.stage import Environment, Gradients, Stage
from crossshard.pipeline.state import CrossShardState
from crossshard.plans import Plan, plan
from crossshard.runners.runners import (
    ShardedFunction,
    batch_parallel,
    replicate,
    rewrite,
    shard,
)
from crossshard.shards.context import ShardContext, get_shard_context, shard_context
from crossshard.shards.devices import cpu_devices
from crossshard.shards.placement import PER_SHARD, REPLICATED, Placement
from crossshard.train_step.divergence import Divergence
from crossshard.train_step.make_train_step import make_train_step
from crossshard.train_step.state import TrainState
from crossshard.train_step.train_step import TrainStep
from crossshard.variables.per_shard import (
    PerShardArray,
    is_per_shard,
    merge_shards,
    set_per_shard,
    set_shared,
)
from crossshard.verification.report import Fault, LeafReport, Verification
from crossshard.verification.verify import verify

__version__ = "0.1.0"

__all__ = [
    *errors.__all__,
    "PER_SHARD",
    "REPLICATED",
    "Checkpoints",
    "Collective",
    "Communication",
    "CrossShardOptimizer",
    "CrossShardState",
    "Diagnosis",
    "Divergence",
    "DynamicLossScale",
    "Environment",
    "Fault",
    "Gradients",
    "Incoming",
    "LeafReport",
    "Nonfinite",
    "NonfiniteState",
    "Optimizer",
    "PerShardArray",
    "Placement",
    "Plan",
    "Reduction",
    "ShardContext",
    "ShardedFunction",
    "Stage",
    "TrainState",
    "TrainStep",
    "Verification",
    "all_to_all",
    "batch_parallel",
    "collective_permute",
    "cpu_devices",
    "cross_replica_sum",
    "doctor",
    "get_shard_context",
    "grad",
    "inspect",
    "is_per_shard",
    "make_train_step",
    "merge_shards",
    "plan",
    "replicate",
    "rewrite",
    "set_per_shard",
    "set_shared",
    "shard",
    "shard_context",
    "verify",
    "value_and_grad",
]
