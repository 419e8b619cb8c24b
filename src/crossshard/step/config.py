"""StepConfig: what a step is made of, checked, before it has seen a model."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.update.plan import WeightUpdate
from crossshard.shards.mesh import number_of_shards
from crossshard.step.losses.loss import StepLoss
from crossshard.step.step_function import StepFunction


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a step is made of.

    Attributes:
      function: the computation.
      mesh: the mesh, with ``AxisType.Auto`` axes, on which the step computes.
      outer_mesh: the mesh as the user made it, on which states, batches and metrics lie.
      axes: its shard axes.
      weight_update: where the weights are updated.
      in_parts: whether the parameters rest in parts.
      wrt: what chooses the trained parameters; ``None`` for all.
      donate: whether a call overwrites its state.
    """

    function: StepFunction
    mesh: Mesh
    outer_mesh: Mesh
    axes: tuple[str, ...]
    weight_update: WeightUpdate
    in_parts: bool = False
    wrt: Any = None
    donate: bool = True

    @property
    def loss(self) -> StepLoss:
        """The loss, with what it does to a batch."""
        return self.function.loss

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the gradients."""
        return self.function.pipeline

    @property
    def number_of_shards(self) -> int:
        """The number of shards."""
        return number_of_shards(self.mesh, self.axes)

    @property
    def is_grouped(self) -> bool:
        """Whether each group has its own parameters."""
        return not self.pipeline.over_all_shards
