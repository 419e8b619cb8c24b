"""The text of ``TrainStep.describe``."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from crossshard._check import is_inexact
from crossshard._text import count, size
from crossshard.gradients.status import leaf_name
from crossshard.jaxprs.row_facts import OverRows
from crossshard.model.layout import StateLayout
from crossshard.model.model_state import ModelState
from crossshard.model.state import TrainState
from crossshard.pipeline.update.owners import Owners
from crossshard.shards.cut import Partition
from crossshard.step.function import StepConfig
from crossshard.step.losses.loss import LossOver, StepLoss

_ONCE = "is known once the step has been lowered, or called"


def describe(config: StepConfig, layout: StateLayout, state: TrainState) -> str:
    """Describe the pipeline, the weight update with its reason, and the arrays with their sizes."""
    arrays, mesh = layout.arrays, layout.mesh
    axes = ", ".join(f"{name}: {number}" for name, number in mesh.shape.items())
    kind = layout.model_state
    kept = "one for each shard" if kind is ModelState.PER_SHARD else "averaged over the shards"
    kept = "one, as the loss returns it" if layout.has_one_state else kept
    frozen = [leaf for leaf in jax.tree.leaves(state.frozen) if is_inexact(leaf)]
    over = f" over {', '.join(layout.axes)}" * bool(layout.shards.other_axes)
    shards = f"{count(layout.number_of_shards, 'shard')}{over} on the mesh ({axes})"
    params_sharded, of_frozen = None, "neither differentiated nor sent"
    if arrays.params_sharded:
        params_sharded, of_frozen = layout, "not differentiated"
    return "\n".join(
        [
            config.describe(arrays),
            f"{shards}; weight update {arrays.where}: {layout.why}",
            *_updated(layout, state),
            *_loss_over_rows(config.loss, layout.number_of_shards),
            *_parameters(config, layout, state),
            *([f"frozen: {_sizes(frozen, params_sharded)}, {of_frozen}"] * bool(frozen)),
            *([f"model state: {_sizes(state.model_state, None)}, {kept}"] if kind else []),
            f"optimizer state: {_sizes(state.opt_state, layout)}",
            *([] if config.sentinel is None else [config.sentinel.describe()]),
        ]
    )


def _loss_over_rows(loss: StepLoss, shards: int) -> list[str]:
    """Describe what the loss is over the rows of the batch, if each shard has its own."""
    known, latest, number = str(loss.record), loss.record.latest, loss.accumulate_steps
    if loss.over_batch:
        return [f"loss: the mean of those of {number} microbatches"] * (number > 1)
    if loss.is_summed and latest is not None and latest.kind is OverRows.MEAN:
        known += "; summed over the shards, its gradient is their number times that of one device"
    if loss.over is LossOver.SHARD:
        known = "each shard's own, loss_over='shard'"
    elif latest is None:
        known = f"what it is in its rows {_ONCE}"
    return [f"loss: {known}"] if loss.is_of_pieces(shards) else []


def _updated(layout: StateLayout, state: TrainState) -> list[str]:
    """Describe how each parameter is updated, if not all are in the same way."""
    arrays = layout.arrays
    if not isinstance(arrays, Owners):
        return []
    leafwise, by_text = arrays.leafwise, dict[str, list[int]]()
    for place, partition in enumerate(arrays.params):
        is_owned = place in arrays.owned
        if place in leafwise.stacked and (is_owned or partition.number > 1):
            text = "layer by layer, each on one shard"
        elif is_owned:
            text = f"whole on one shard each, since {leafwise.whole[place]}"
        elif partition.number > 1:
            text = "element by element, a slice on each shard"
        else:
            text = "on every shard"
        by_text.setdefault(text, []).append(place)
    names = _named(state.params, range(len(arrays.params)))
    of_whole = {i: owner for (i, row), owner in arrays.owners.items() if row is None}
    owner = lambda i: f" (shard {of_whole[i]})" if i in of_whole else ""
    return [
        f"  updated {text}: {', '.join(names[i] + owner(i) for i in places)}"
        for text, places in sorted(by_text.items())
    ]


def _parameters(config: StepConfig, layout: StateLayout, state: TrainState) -> list[str]:
    """Describe how parameters are kept, and where they are gathered or their gradients summed."""
    partitions = layout.arrays.params
    if not layout.arrays.params_sharded or all(each.number == 1 for each in partitions):
        whole = f"parameters: {_sizes(state.params, None)}, replicated"
        if state.grouped:
            whose = "worker" if config.pipeline.joins_groups else "group"
            whole = f"parameters: {_sizes(state.params, layout)}, each {whose}'s own"
        names = _named(state.params, layout.uses.latest or ())
        summed = f"gradients summed row by row, in the backward pass: {', '.join(names)}"
        return [whole + _split(layout, state), *([summed] * bool(names))]
    first, uses = f"parameters: {_sizes(state.params, layout)}", layout.uses.latest
    if why := config.why_own_gradient(layout.arrays):
        since = f"since {why} needs each shard's own gradient"
        return [first, f"  all are gathered at once, at the start of the step, {since}"]
    if uses is None and any(each.travels_alone for each in partitions):
        return [first, f"  where each is gathered {_ONCE}"]
    by_text: dict[str, list[int]] = {}
    pairs = zip(partitions, jax.tree.leaves(state.params), strict=True)
    for place, (partition, x) in enumerate(pairs):
        text = _gathered(config, partition, x, (uses or {}).get(place, ()))
        by_text.setdefault(text, []).append(place)
    named = lambda places: ", ".join(_named(state.params, places))
    return [first, *(f"  {text}: {named(places)}" for text, places in by_text.items())]


def _gathered(config: StepConfig, partition: Partition, x: Any, uses: Sequence[str]) -> str:
    """Describe where a sharded parameter is gathered, how often, and in which dtype."""
    if partition.number == 1:
        return "replicated, since it is tiny or none of its axes divides"
    if not partition.travels_alone:
        wire = config.gather_dtype or x.dtype
        return f"gathered at the start of the step, with other small ones, in {wire}"
    if not uses:
        return "not gathered, since the loss does not use it"
    times = [
        f"{count} times {text}" if count > 1 else text for text, count in Counter(uses).items()
    ]
    return f"gathered {' and '.join(times)}"


def _named(tree: Any, places: Iterable[int]) -> list[str]:
    """Return the names of the leaves at these places."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [leaf_name(paths[place][0]) for place in places]


def _split(layout: StateLayout, state: TrainState) -> str:
    """Describe how parameters are split over the other axes."""
    of_params = layout.other_axes[: len(jax.tree.leaves(state.params))]
    if not any(of_params):
        return ""
    over = [axis for axis in layout.shards.other_axes if any(axis in str(own) for own in of_params)]
    number, blocks = sum(map(bool, of_params)), size(bytes_on_device(state.params))
    return f"; {number} of them split over {', '.join(over)}, {blocks} on each device"


def _sizes(tree: Any, layout: StateLayout | None) -> str:
    leaves = jax.tree.leaves(tree)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    words = f"{size(whole)} in {count(len(leaves), 'array')}"
    if layout is None:
        return words
    place = "device" if layout.shards.other_axes else "shard"
    return f"{words}, {size(bytes_on_device(tree))} of it on each {place}"


def bytes_on_device(tree: Any) -> int:
    """Return the bytes of a tree's blocks on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
