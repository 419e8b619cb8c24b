"""Wrap any Optax optimizer, and every shard steps correctly."""

import importlib
from typing import TYPE_CHECKING, Any

from crossshard import distributed as distributed
from crossshard.collectives.cross_replica import all_to_all, collective_permute, cross_replica_sum
from crossshard.errors import CrossshardError
from crossshard.gradients.local import grad, value_and_grad
from crossshard.gradients.mean import Mean
from crossshard.gradients.status import Reduction
from crossshard.model.state import TrainState
from crossshard.nnx.optimizer import CrossShardOptimizer
from crossshard.pipeline.stage import CrossShardState, Stage
from crossshard.pipeline.stages.loss_scale import DynamicLossScale
from crossshard.pipeline.stages.nonfinite import Nonfinite
from crossshard.shards.axes import get_shard_context, shard_context
from crossshard.shards.devices import cpu_devices
from crossshard.step.make_train_step import make_train_step
from crossshard.step.rowwise import rowwise
from crossshard.step.train_step import TrainStep

if TYPE_CHECKING:
    from crossshard import checkpoints as checkpoints
    from crossshard import errors as errors
    from crossshard import guards as guards
    from crossshard import nnx as nnx
    from crossshard import pipeline as pipeline
    from crossshard import step as step
    from crossshard import tf1 as tf1
    from crossshard import tools as tools
    from crossshard.checkpoints import Checkpoints
    from crossshard.nnx import merge_shards, shard
    from crossshard.tools import doctor, inspect, plan, verify

__version__ = "0.4.0.dev0"

__all__ = [
    "Checkpoints",
    "CrossShardOptimizer",
    "CrossShardState",
    "CrossshardError",
    "DynamicLossScale",
    "Mean",
    "Nonfinite",
    "Reduction",
    "Stage",
    "TrainState",
    "TrainStep",
    "all_to_all",
    "collective_permute",
    "cpu_devices",
    "cross_replica_sum",
    "doctor",
    "get_shard_context",
    "grad",
    "inspect",
    "make_train_step",
    "merge_shards",
    "plan",
    "rowwise",
    "shard",
    "shard_context",
    "value_and_grad",
    "verify",
]

# Imported on first use, since Orbax, Flax and the tools take longer to import than the rest.
_LATER = {
    "checkpoints": "Checkpoints",
    "nnx": "merge_shards shard",
    "tools": "doctor inspect plan verify",
}
_MODULES = ("checkpoints", "errors", "guards", "nnx", "pipeline", "step", "tf1", "tools")


# A type checker sees only the names above.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        for module, names in _LATER.items():
            if name in names.split():
                return getattr(importlib.import_module(f"{__name__}.{module}"), name)
        for module in _MODULES:
            if name in getattr(importlib.import_module(f"{__name__}.{module}"), "__all__", ()):
                raise AttributeError(
                    f"crossshard.{name} is in a module: crossshard.{module}.{name}."
                )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "distributed", "__version__"])
