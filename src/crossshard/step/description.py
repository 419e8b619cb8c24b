"""The texts of ``TrainStep.describe`` and of ``print(step)``."""

import math
from typing import Any

import jax

from crossshard._text import size
from crossshard.gradients.scalars import is_inexact
from crossshard.model.layout import StateLayout
from crossshard.model.model_state import ModelState
from crossshard.model.state import TrainState
from crossshard.step.step_function import StepFunction


def describe(function: StepFunction, layout: StateLayout, state: TrainState) -> str:
    """The pipeline, the weight update with its reason, and the arrays with their sizes."""
    plan, mesh = layout.plan, layout.mesh
    axes = ", ".join(f"{name}: {number}" for name, number in mesh.shape.items())
    kind = layout.model_state
    frozen = [leaf for leaf in jax.tree.leaves(state.frozen) if is_inexact(leaf)]
    over = f" over {', '.join(layout.axes)}" * bool(layout.unnamed_axes)
    shards = f"{layout.number_of_shards} shards{over} on the mesh ({axes})"
    in_parts, whole, of_frozen = None, ", whole on every shard", "neither differentiated nor sent"
    if plan.in_parts:
        in_parts, whole, of_frozen = layout, "", "not differentiated"
    return "\n".join(
        [
            function.describe(plan.strategy),
            f"{shards}; weight update {plan.strategy}: {plan.why}",
            f"parameters: {_sizes(state.params, in_parts)}{whole}" + _split(layout, state),
            *([f"frozen: {_sizes(frozen, in_parts)}, {of_frozen}"] * bool(frozen)),
            *([f"model state: {_sizes(state.model_state, None)}, {_KEPT[kind]}"] if kind else []),
            f"optimizer state: {_sizes(state.opt_state, layout)}",
            *([] if function.sentinel is None else [function.sentinel.describe()]),
        ]
    )


def summarize(
    function: StepFunction, shards: int, wrt: Any, latest: tuple[StateLayout, TrainState] | None
) -> str:
    """What ``print(step)`` says; ``latest`` is what ``init`` decided, if it was called."""
    chooses = getattr(wrt, "__name__", repr(wrt))
    how = "how the weights are updated is decided by init(params)"
    return "\n".join(
        [
            f"Training step of {function.loss.name} on {shards} shards",
            *([] if wrt is None else [f"trains only what wrt={chooses:.60} chooses"]),
            f"metrics: {', '.join(function.names_of_metrics())}",
            *([function.describe(), how] if latest is None else [describe(function, *latest)]),
        ]
    )


_KEPT = {
    ModelState.MEAN: "averaged over the shards",
    ModelState.PER_SHARD: "one for each shard",
}


def _split(layout: StateLayout, state: TrainState) -> str:
    """How parameters are split over the other axes."""
    of_params = layout.other_axes[: len(jax.tree.leaves(state.params))]
    if not any(of_params):
        return ""
    number = sum(map(bool, of_params))
    over = [axis for axis in layout.unnamed_axes if any(axis in str(own) for own in of_params)]
    blocks = size(bytes_on_device(state.params))
    return f"; {number} of them split over {', '.join(over)}, {blocks} on each device"


def _sizes(tree: Any, layout: StateLayout | None) -> str:
    leaves = jax.tree.leaves(tree)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    words = f"{size(whole)} in {len(leaves)} arrays"
    if layout is None:
        return words
    place = "device" if layout.unnamed_axes else "shard"
    return f"{words}, {size(bytes_on_device(tree))} of it on each {place}"


def bytes_on_device(tree: Any) -> int:
    """The bytes of one device's blocks."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
