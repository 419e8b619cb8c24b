"""Aggregate: the mean or the sum of the shards' gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.collectives.all_reduce import widen
from crossshard.collectives.bucketing import bucketed_sum
from crossshard.gradients.reduction import Reduction
from crossshard.gradients.status import GradientStatus, Statuses, check_shapes
from crossshard.pipeline.means import average
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition, slice_index


@dataclasses.dataclass(frozen=True)
class NoteDtypes(Stage):
    """Notes the dtypes of gradients as they arrive, which later stages widen.

    Attributes:
      masters: the dtype of master weights, which take gradients of as many bits; or ``None``.
    """

    masters: Any = None

    phase = Phase.ARRIVAL
    scope = "dtypes"
    state_field = ""
    needs_local = ""

    def update(
        self, gradients: Gradients, state: Any, context: StageContext
    ) -> tuple[Gradients, Any]:
        """The same gradients, with ``dtypes``."""
        values = jax.tree.leaves(gradients.values)
        # compute_gradients divides in float32, and 16-bit parameters need 16-bit gradients.
        like = values if context.params is None else jax.tree.leaves(context.params)
        dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(dict(gradients.extra))]
        # The parameters of optax.lookahead have more leaves than the gradients.
        for leaf, param, status in zip(values, like, gradients.status, strict=False):
            is_widened = status is GradientStatus.SCALED or gradients.widened
            dtype = jnp.result_type(param if is_widened else leaf)
            if self.masters is not None and status is not None:
                dtype = jnp.promote_types(dtype, self.masters)
            dtypes.append(dtype)
        return gradients.replace(dtypes=tuple(dtypes)), state


@dataclasses.dataclass(frozen=True)
class Aggregate(Stage):
    """The mean or the sum over the shards, or over the group.

    With weights the mean is ``sum(w · g) / sum(w)``.

    Attributes:
      reduction: MEAN or SUM.
      groups: the groups that reduce independently; ``None`` for all shards.
      axis_name: the named mesh axes of the shards.
      dtype: the dtype in which gradients are sent; ``None`` for their own, or float32.
    """

    reduction: Reduction
    groups: GroupAssignment | None = None
    axis_name: tuple[str, ...] = ()
    dtype: Any = None

    phase = Phase.REDUCTION
    scope = "reduce"
    state_field = "aggregate"

    def describe(self) -> str:
        """``mean over all shards``, with the axes and the dtype if they are given."""
        word = "sum" if self.reduction is Reduction.SUM else "mean"
        over = "all shards" if self.groups is None else f"groups {self.groups}"
        axes = f" on {', '.join(self.axis_name)}" if self.axis_name else ""
        wire = f" in {self.dtype}" if self.dtype is not None else ""
        return f"{word} over {over}{axes}{wire}"

    def update(
        self, gradients: Gradients, state: Any, context: StageContext
    ) -> tuple[Gradients, Any]:
        """The reduced gradients: in full, or this shard's slice of each if arrays are split."""
        if context.params is not None:
            check_shapes(gradients.values, context.params)
        shards, groups = context.shards, context.groups
        extra, values = dict(gradients.extra), gradients.values
        leaves, tree = jax.tree.flatten((extra, values))
        status = (*gradients.extra_status, *_unless_unread(gradients.status, context.unread))
        partitions = _partitions(extra, values, context)
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
                total = average(total, total_weight, context.divisor)
            reduced_leaves.append(total.astype(gradients.dtypes[index]))
        extra, values = tree.unflatten(reduced_leaves)
        # If all weights are zero there is no gradient, and weights must not decay either.
        skip = None if total_weight is None else total_weight == 0
        reduced = Gradients(values, extra, total_weight, totals_of_others, skip)
        return reduced, state

    def _as_sent(self, gradient: Any) -> jax.Array:
        wide = widen(gradient)
        return wide if self.dtype is None or jnp.iscomplexobj(wide) else wide.astype(self.dtype)


_TO_SUM = (GradientStatus.LOCAL, GradientStatus.SCALED)
_TO_DIVIDE = (GradientStatus.LOCAL, GradientStatus.SUMMED)


def _unless_unread(status: Statuses, unread: tuple[bool, ...]) -> Statuses:
    """The status of each gradient; those that nothing reads count as reduced: they are all zero."""
    if not any(unread):
        return status
    pairs = zip(status, unread, strict=True)
    return tuple(GradientStatus.REDUCED if is_unread else each for each, is_unread in pairs)


def _partitions(extra: dict[str, Any], values: Any, context: StageContext) -> list[Partition]:
    """The partition of each reduced leaf: gradients as the parameters, a loss replicated."""
    split = context.arrays.partitions
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
