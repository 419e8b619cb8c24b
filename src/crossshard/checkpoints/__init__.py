"""Checkpoints: the whole state of a step on disk, restored on any number of shards."""

from crossshard.checkpoints.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
