"""Rebuild: a step again with another optimizer, to be compared with itself on one shard."""

import dataclasses

import optax
from jax.sharding import Mesh

from crossshard.gradients.reduction import Reduction
from crossshard.pipeline.metrics import Metrics
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.plan import WeightUpdate
from crossshard.train_step.mesh import number_of_shards
from crossshard.train_step.train_step import TrainStep


def with_sgd(step: TrainStep, optimizer: optax.GradientTransformation, *, alone: bool) -> TrainStep:
    """The same step with another optimizer, for many shards or for one.

    Args:
      step: the step.
      optimizer: in the place of the wrapped one.
      alone: for one shard, without what only several need.
    """
    function, mesh = step._function, step._mesh
    # Metrics may be those of the optimizer that it had.
    pipeline = dataclasses.replace(function.pipeline, inner=optimizer, metrics=Metrics())
    if not alone:
        function = dataclasses.replace(function, pipeline=pipeline, sentinel=None)
        return TrainStep(function, mesh, step._axes, step._weight_update, step._wrt)
    pipeline = Pipeline(
        pipeline.inner, Reduction.MEAN, None, pipeline.axis_name, preprocess=pipeline.preprocess
    )
    loss = dataclasses.replace(function.loss, accumulate_steps=1)
    function = dataclasses.replace(function, pipeline=pipeline, loss=loss, sentinel=None)
    first = tuple(slice(1) if axis in step._axes else slice(None) for axis in mesh.axis_names)
    mesh = Mesh(mesh.devices[first], mesh.axis_names, axis_types=mesh.axis_types)
    return TrainStep(function, mesh, step._axes, WeightUpdate.REPLICATED, step._wrt)


def groups_of(step: TrainStep) -> tuple[tuple[tuple[int, ...], ...], float]:
    """The shards that reduce together, and the factor of their reduction: N under SUM."""
    number = number_of_shards(step._mesh, step._axes)
    groups = step._function.pipeline.groups
    members = (tuple(range(number)),) if groups is None else groups.groups
    is_sum = step._function.pipeline.reduction is Reduction.SUM
    return members, float(len(members[0])) if is_sum else 1.0
