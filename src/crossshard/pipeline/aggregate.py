"""Aggregate: the mean or the sum of the shards' gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.collectives.all_reduce import widen
from crossshard.collectives.bucketing import bucketed_sum
from crossshard.gradients.incoming import Incoming
from crossshard.pipeline.means import average
from crossshard.pipeline.stage import Environment, Gradients, Stage
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition, slice_index


@dataclasses.dataclass(frozen=True)
class Sum(Stage):
    """The sum over the shards, or over the group.

    Attributes:
      dtype: the dtype in which gradients are sent; ``None`` for their own, or float32.
    """

    dtype: Any = None
    word = "sum"

    def divisor(self, number_of_shards: int, groups: GroupAssignment | None) -> int:
        """1: a sum is not divided."""
        del number_of_shards, groups
        return 1

    def describe(self) -> str:
        """``sum`` or ``mean``."""
        return self.word

    def update(
        self, gradients: Gradients, state: Any, environment: Environment
    ) -> tuple[Gradients, Any]:
        """The reduced gradients: in full, or this shard's slice of each if arrays are split."""
        shards, groups = environment.shards, environment.groups
        extra, values = dict(gradients.extra), gradients.values
        leaves, tree = jax.tree.flatten((extra, values))
        status = (*gradients.extra_status, *gradients.status)
        partitions = _partitions(extra, values, environment)
        to_sum = [index for index, each in enumerate(status) if each in _TO_SUM]
        number_of_extra = len(gradients.extra_status)
        summands = [
            widen(leaves[index]) if index < number_of_extra else self._as_sent(leaves[index])
            for index in to_sum
        ]
        split = [partitions[index] for index in to_sum]
        # The weight and other sums travel in the bucket of the loss.
        others, other_tree = jax.tree.flatten((gradients.weight, dict(gradients.sums)))
        summands += others
        split += [Partition(jnp.shape(other)) for other in others]
        sums = bucketed_sum(summands, split, shards, groups)
        total_weight, totals_of_others = other_tree.unflatten(sums[len(to_sum) :])
        totals = dict(zip(to_sum, sums[: len(to_sum)], strict=True))
        reduced_leaves = []
        for index, (leaf, each) in enumerate(zip(leaves, status, strict=True)):
            if each is None:
                reduced_leaves.append(leaf)
                continue
            total = totals.get(index)
            if total is None:
                total = partitions[index].local_slice(widen(leaf), slice_index(shards, groups))
            if each in _TO_DIVIDE:
                total = average(total, total_weight, environment.divisor)
            reduced_leaves.append(total)
        extra, values = tree.unflatten(reduced_leaves)
        # If all weights are zero there is no gradient, and weights must not decay either.
        skip = None if total_weight is None else total_weight == 0
        reduced = gradients.replace(
            values=values, extra=extra, weight=total_weight, sums=totals_of_others, skip=skip
        )
        return reduced, state

    def _as_sent(self, gradient: Any) -> jax.Array:
        wide = widen(gradient)
        return wide if self.dtype is None or jnp.iscomplexobj(wide) else wide.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Mean(Sum):
    """The mean over the shards, or over the group; with weights, ``sum(w · g) / sum(w)``."""

    word = "mean"

    def divisor(self, number_of_shards: int, groups: GroupAssignment | None) -> int:
        """The number of shards that reduce together."""
        return number_of_shards if groups is None else groups.size


_TO_SUM = (Incoming.LOCAL, Incoming.SCALED)
_TO_DIVIDE = (Incoming.LOCAL, Incoming.SUMMED)


def _partitions(extra: dict[str, Any], values: Any, environment: Environment) -> list[Partition]:
    """The partition of each reduced leaf: gradients as the parameters, a loss replicated."""
    split = environment.arrays.partitions
    trees = [*((extra[name], name == "grad") for name in sorted(extra)), (values, True)]
    return [
        partition
        for tree, is_gradient in trees
        for partition in (
            split
            if is_gradient and split is not None
            else [Partition(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]
        )
    ]
