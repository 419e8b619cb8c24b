"""InOrder: the sum over virtual shards in one fixed order, whatever the number of shards."""

import dataclasses

import jax

from crossshard._annotations import PyTree
from crossshard.collectives.in_order import sum_in_order, sum_of_nodes
from crossshard.pipeline.aggregators.aggregator import Aggregator, Peers, Summands
from crossshard.pipeline.stage import StageContext


@dataclasses.dataclass(frozen=True)
class InOrder(Aggregator):
    """The sum over virtual shards, of which every shard gives as many partial sums.

    Attributes:
      virtual_shards: how many there are on all shards together.
    """

    virtual_shards: int

    divides_before = False
    takes_nodes = True

    def sum(self, values: PyTree, state: PyTree, peers: Peers) -> tuple[PyTree, PyTree]:
        """The sums of arrays ``[nodes, …]``, one by one."""
        of_all = lambda x: peers.gather(x).reshape(-1, *x.shape[1:])
        return jax.tree.map(lambda x: sum_of_nodes(of_all(x)), values), state

    def reduce(
        self, summands: Summands, state: PyTree, context: StageContext
    ) -> tuple[list[jax.Array], PyTree]:
        """The slices of the sums, of arrays ``[nodes, …]`` that are weighed already."""
        partitions = [
            each if each.number > 1 else dataclasses.replace(each, shape=x.shape[1:])
            for x, each in zip(summands.arrays, summands.partitions, strict=True)
        ]
        return sum_in_order(summands.arrays, partitions, context.shards), state

    def describe(self) -> str:
        """How many virtual shards there are."""
        return f"as {self.virtual_shards} virtual shards, added in a fixed order"
