"""Plain: the sum over the shards, as XLA adds it, in 32 bits or sent in 16."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from crossshard._annotations import PyTree
from crossshard.collectives.bucketing import bucketed_sum
from crossshard.collectives.sums import widen
from crossshard.pipeline.aggregators.aggregator import Aggregator, Peers, Summands
from crossshard.pipeline.stage import StageContext
from crossshard.shards.cut import Partition


@dataclasses.dataclass(frozen=True)
class Plain(Aggregator):
    """The sum over the shards.

    Attributes:
      dtype: the dtype in which gradients are sent; ``None`` for their own, or float32.
    """

    dtype: Any = None

    divides_before = False

    def sum(self, values: PyTree, state: PyTree, peers: Peers) -> tuple[PyTree, PyTree]:
        """The sums in full; small arrays share a collective."""
        leaves, tree = jax.tree.flatten(values)
        sent = [as_sent(x, self.dtype) for x in leaves]
        wholes = [Partition(x.shape) for x in sent]
        return tree.unflatten(bucketed_sum(sent, wholes, peers.shards)), state

    def reduce(
        self, summands: Summands, state: PyTree, context: StageContext
    ) -> tuple[list[jax.Array], PyTree]:
        """The slices of the sums; small arrays share a collective with the loss."""
        sent = [
            x if place is None else as_sent(x, self.dtype)
            for x, place in zip(summands.arrays, summands.places, strict=True)
        ]
        return bucketed_sum(sent, summands.partitions, context.shards), state

    def describe(self) -> str:
        """The dtype, if it is given."""
        return f"in {self.dtype}" if self.dtype is not None else ""


def as_sent(gradient: Any, dtype: Any) -> jax.Array:
    """A gradient in the dtype in which it is sent: this one, or its own with at least 32 bits."""
    wide = widen(gradient)
    return wide if dtype is None or jnp.iscomplexobj(wide) else wide.astype(dtype)
