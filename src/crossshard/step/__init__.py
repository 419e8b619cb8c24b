"""The whole training step: loss, gradients, reduction, sharded weight update."""

from crossshard.model.state import TrainState
from crossshard.step.make_train_step import StepOptions, make_train_step
from crossshard.step.nonfinite_origin import NonfiniteOrigin
from crossshard.step.prefetch import Prefetch
from crossshard.step.train_step import TrainStep

__all__ = [
    "NonfiniteOrigin",
    "Prefetch",
    "StepOptions",
    "TrainState",
    "TrainStep",
    "make_train_step",
]
