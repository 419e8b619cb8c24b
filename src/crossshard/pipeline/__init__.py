"""The gradient pipeline: the stages between autodiff and the optimizer, and their order."""

from crossshard.collectives.few_bits import Quantized
from crossshard.gradients.status import GradientStatus
from crossshard.pipeline.aggregator import Aggregator, Peers
from crossshard.pipeline.pipeline import Options
from crossshard.pipeline.stage import CrossShardState, Gradients, Phase, Stage, StageContext
from crossshard.pipeline.stages.few_bits import FewBitsState
from crossshard.pipeline.stages.loss_scale import DynamicLossScale
from crossshard.pipeline.stages.nonfinite import Nonfinite, NonfiniteState
from crossshard.shards.cut import PER_SHARD, REPLICATED, Placement

__all__ = [
    "PER_SHARD",
    "REPLICATED",
    "Aggregator",
    "CrossShardState",
    "DynamicLossScale",
    "FewBitsState",
    "GradientStatus",
    "Gradients",
    "Nonfinite",
    "NonfiniteState",
    "Options",
    "Peers",
    "Phase",
    "Placement",
    "Quantized",
    "Stage",
    "StageContext",
]
