"""Rebuild: what tools use of a step.

It makes a step anew with another optimizer, for all shards and for one, to compare them, and tells
its rows, groups, axes and sizes.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.collectives.few_bits import Codec
from crossshard.errors import ArgumentError
from crossshard.gradients.status import Reduction
from crossshard.guards import SELDOM
from crossshard.jaxprs.primitives import DRAWS
from crossshard.jaxprs.walk import equations_of
from crossshard.model.models import partition
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stages.few_bits import FewBits
from crossshard.pipeline.stages.metrics import Metrics
from crossshard.pipeline.stages.nonfinite import RARE as IF_NOT_FINITE
from crossshard.pipeline.update.plan import WeightUpdate
from crossshard.shards.batch_axes import BatchAxes, take_rows
from crossshard.step.describe import bytes_on_device
from crossshard.step.flops import Flops, check_is_step, count_flops, number_of_rows
from crossshard.step.losses import changed
from crossshard.step.losses.loss import LossOver
from crossshard.step.train_step import TrainStep, config_of

__all__ = [
    "RARE_SCOPES",
    "Flops",
    "axes_of_batch",
    "bytes_on_device",
    "check_is_step",
    "count_flops",
    "draws",
    "groups_of",
    "loss_over_rows_of",
    "number_of_parameters",
    "number_of_rows",
    "on_part_of_mesh",
    "own_rows",
    "with_optimizer",
    "without_in_proof",
]

# The scopes of what runs in few steps.
RARE_SCOPES = frozenset({IF_NOT_FINITE, SELDOM})


def with_optimizer(
    step: TrainStep, optimizer: optax.GradientTransformation, *, alone: bool
) -> TrainStep:
    """Return a step with another optimizer, for many shards or for one, that sends all bits.

    Args:
      step: the step.
      optimizer: the optimizer in the place of the wrapped one.
      alone: whether to make it for one shard, on devices of this process, without what only several
        shards need.
    """
    config = config_of(step)
    # Metrics may be those of the former optimizer.
    pipeline = config.pipeline.without(lambda kind: kind is Metrics or kind.joins_groups)
    if isinstance(pipeline.aggregator, FewBits):
        pipeline = pipeline.with_options(reduce_dtype=None, aggregator=None)
    pipeline = dataclasses.replace(pipeline, inner=optimizer)
    gather_dtype = None if isinstance(config.gather_dtype, Codec) else config.gather_dtype
    config = dataclasses.replace(
        config, pipeline=pipeline, gather_dtype=gather_dtype, sentinel=None
    )
    if not alone:
        return TrainStep(config)
    of_one = Pipeline(
        optimizer,
        Reduction.MEAN,
        axis_name=pipeline.axis_name,
        options={name: pipeline.options[name] for name in pipeline.of_own_gradient},
    )
    mesh, loss = _own_shard(config.mesh, config.axes), config.loss
    one = changed(loss, accumulate_steps=1, virtual_shards=None)
    own = dataclasses.replace(
        config,
        pipeline=of_one,
        # Microbatches of a loss over the batch are other losses, also on one shard.
        loss=loss if loss.over is LossOver.BATCH else one,
        mesh=mesh,
        outer_mesh=mesh,
        weight_update=WeightUpdate.REPLICATED,
        params_sharded=False,
    )
    return TrainStep(own)


def without_in_proof(step: TrainStep) -> list[str]:
    """Describe what is compared with one device, where that is not the step and its loss.

    ``with_optimizer`` leaves out what no device alone does.
    """
    config = config_of(step)
    sent, found = [], []
    if isinstance(config.pipeline.aggregator, FewBits):
        sent.append(f"gradients {config.pipeline.aggregator.describe()}")
    if isinstance(config.gather_dtype, Codec):
        sent.append(f"parameters in {config.gather_dtype}")
    if sent:
        found.append(
            f"it was verified in float32: it sends {' and '.join(sent)}, which no single step is "
            "exact in"
        )
    if config.loss.over is LossOver.BATCH and config.loss.accumulate_steps > 1:
        found.append(
            f"one device took the same {config.loss.accumulate_steps} microbatches: with "
            "loss_over='batch' each has its own loss, and a loss that is no mean over rows another "
            "one than the whole batch"
        )
    if config.pipeline.joins_groups:
        found.append(
            "it was verified as a step in which all shards reduce: workers that train alone take "
            "none of one device"
        )
    return found


def _own_shard(mesh: Mesh, axes: tuple[str, ...]) -> Mesh:
    """Return the part of a mesh that is one shard, the first of this process."""
    sizes = [mesh.shape[axis] if axis in axes else 1 for axis in mesh.axis_names]
    for place in np.ndindex(*sizes):
        of_shard = tuple(
            slice(index, index + 1) if axis in axes else slice(None)
            for axis, index in zip(mesh.axis_names, place, strict=True)
        )
        devices = mesh.devices[of_shard]
        if all(device.process_index == jax.process_index() for device in devices.flat):
            return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    raise ArgumentError(
        "A step is compared with one shard in each process, and no shard has all of its devices in "
        f"process {jax.process_index()}. Split the model over fewer devices, or take one process."
    )


def on_part_of_mesh(x: Any, mesh: Mesh) -> Any:
    """Move an array to the mesh of one shard, if it is on its devices; return others unchanged."""
    spec = getattr(getattr(x, "sharding", None), "spec", None)
    if spec is None:
        return x
    spec = PartitionSpec() if x.sharding.is_fully_replicated else spec
    here = set(mesh.devices.flat)
    pieces = [piece.data for piece in x.addressable_shards if piece.device in here]
    if len(pieces) < len(here):
        return x
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, spec), pieces)


def own_rows(step: TrainStep, batch: Any) -> Any:
    """Return the rows that this process passes of a batch of all processes."""
    if jax.process_count() == 1:
        return batch

    def cut(leaf: Any, axis: int | None) -> Any:
        if axis is None:
            return leaf
        return take_rows(np.asarray(leaf), axis, step.own_rows(leaf.shape[axis]))

    return jax.tree.map(cut, batch, axes_of_batch(step).tree_of(batch))


def loss_over_rows_of(step: TrainStep) -> str:
    """Describe what is known of a step's loss over its rows; empty if it is given all rows."""
    config, loss = config_of(step), config_of(step).loss
    if not loss.is_of_pieces(config.number_of_shards):
        return ""
    if loss.over is LossOver.SHARD:
        return "each shard's own loss is meant"
    return f"in its rows the loss is {loss.record}"


def groups_of(step: TrainStep) -> tuple[tuple[int, ...], ...]:
    """Return the shards that reduce together."""
    config = config_of(step)
    groups = config.pipeline.groups
    return (tuple(range(config.number_of_shards)),) if groups is None else groups.groups


def has_equal_shards(step: TrainStep) -> bool:
    """Return whether each shard computes as many virtual shards, or there are none."""
    config = config_of(step)
    return config.loss.parts(config.number_of_shards) % config.number_of_shards == 0


def axes_of_batch(step: TrainStep) -> BatchAxes:
    """Return the axes along which the arrays of a step's batch have their rows."""
    return config_of(step).loss.batch_axes


def number_of_parameters(params: Any, wrt: Any) -> int:
    """Count the numbers of a model of arrays or types, with those that are not trained."""
    _, trained, frozen, *_ = partition(params, wrt)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((trained, frozen)))


def draws(traced: Any) -> bool:
    """Return whether a traced program draws random numbers."""
    return any(each.primitive.name in DRAWS for each in equations_of(traced.jaxpr))
