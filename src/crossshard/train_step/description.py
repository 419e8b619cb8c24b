"""The text that ``TrainStep.describe`` returns."""

import math
from typing import Any

import jax

from crossshard.gradients.scalars import is_inexact
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.model_state import ModelState
from crossshard.train_step.state import TrainState
from crossshard.train_step.step_function import StepFunction


def describe(function: StepFunction, layout: StateLayout, state: TrainState) -> str:
    """The pipeline, the weight update with its reason, and the arrays with their sizes."""
    plan, mesh = layout.plan, layout.mesh
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    kind = layout.model_state
    frozen = [leaf for leaf in jax.tree.leaves(state.frozen) if is_inexact(leaf)]
    return "\n".join(
        [
            function.describe(plan.strategy),
            f"{mesh.size} shards on the mesh ({axes}); weight update {plan.strategy}: {plan.why}",
            f"parameters: {_sizes(state.params, None)}, whole on every shard",
            *([f"frozen: {_sizes(frozen, None)}, neither differentiated nor sent"] * bool(frozen)),
            *([f"model state: {_sizes(state.model_state, None)}, {_KEPT[kind]}"] if kind else []),
            f"optimizer state: {_sizes(state.opt_state, layout)}",
        ]
    )


_KEPT = {
    ModelState.MEAN: "averaged over the shards",
    ModelState.PER_SHARD: "one for each shard",
}


def _sizes(tree: Any, layout: StateLayout | None) -> str:
    leaves = jax.tree.leaves(tree)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    words = f"{_megabytes(whole)} in {len(leaves)} arrays"
    if layout is None:
        return words
    own = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
    return f"{words}, {_megabytes(own)} of it on each shard"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
