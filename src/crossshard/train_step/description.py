"""What a step will do, in words and sizes."""

import math
from typing import Any

import jax

from crossshard.optimizer.weight_update import Path
from crossshard.train_step.computation import Computation
from crossshard.train_step.placing import Placing
from crossshard.train_step.state import TrainState

_UPDATES = {
    Path.WHOLE: "update on every shard",
    Path.PARTS: "update in parts → gather",
    Path.GLOBAL: "update on sharded global arrays → gather",
}


def describe(computation: Computation, placing: Placing, state: TrainState) -> str:
    """The way of a gradient, the path of the update with its reason, and where the arrays lie."""
    plan, mesh = placing.plan, placing.mesh
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    return "\n".join(
        [
            computation.pipeline.describe(
                weighed=computation.weight is not None, update=_UPDATES[plan.path]
            ),
            f"{mesh.size} shards on the mesh ({axes}); weight update {plan.path}: {plan.why}",
            f"parameters: {_sizes(state.params, None)}, whole on every shard",
            f"optimizer state: {_sizes(state.opt_state, placing)}",
        ]
    )


def _sizes(tree: Any, placing: Placing | None) -> str:
    leaves = jax.tree.leaves(tree)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    words = f"{_megabytes(whole)} in {len(leaves)} arrays"
    if placing is None:
        return words
    own = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
    return f"{words}, {_megabytes(own)} of it on each shard"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
