"""Guards: whether the shards still have the same bits, and which of them differ."""

from crossshard.guards.divergence import Divergence

__all__ = ["Divergence"]
