"""Aggregate: the mean or the sum of the shards' gradients, and their weights."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from crossshard import _check
from crossshard._annotations import Given, PyTree
from crossshard._check import is_number
from crossshard.collectives.sums import average, sum_over_shards, to_average, widen
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.status import GradientStatus, Reduction, check_shapes
from crossshard.pipeline.aggregator import Aggregator, Plain, Sent, unsplit
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged, as_local
from crossshard.pipeline.stages.few_bits import FewBits, check_reduce_dtype
from crossshard.shards.axes import GroupAssignment
from crossshard.shards.cut import PER_SHARD, Partition


def check_weighable(reduction: Reduction) -> None:
    """Raise ArgumentError under SUM, where shards cannot have weights."""
    if reduction is Reduction.SUM:
        raise ArgumentError(
            "weight is a shard's weight in a mean, but the optimizer's reduction is SUM. Use MEAN, "
            "or leave weight out and weigh the loss."
        )


def as_weight(given: Any, what: str = "got") -> Float[Array, ""]:
    """Return the weight of a shard in the mean, in JAX's default precision.

    Raises:
      ArgumentError: the weight is not a scalar.
      ArgumentTypeError: the weight is not a number.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        given = _check.number("A shard's weight", given)
    value = _check.as_array("A shard's weight", given) if is_number(given) else None
    kinds = jnp.floating, jnp.integer, jnp.bool_
    if value is None or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
        raise ArgumentTypeError(
            f"A shard's weight is one number; {what} {_check.described(given)}."
        )
    value = value.astype(float)
    if value.shape != ():
        raise ArgumentError(
            f"A shard's weight is one number; {what} an array of shape {value.shape}. Sum it."
        )
    kinds_of_known = float, int, np.generic, np.ndarray, jax.Array
    is_known = isinstance(given, kinds_of_known) and not isinstance(given, jax.core.Tracer)
    if not is_known or not getattr(given, "is_fully_addressable", True):
        return value
    number = np.asarray(given).item()
    _check.finite("A shard's weight", number)
    if number < 0:
        raise ArgumentError(f"A shard's weight is at least 0; {what} {number}.")
    return value


@dataclasses.dataclass(frozen=True)
class Weigh(Stage):
    """Multiplies gradients by the shard's weight; those of weight 0 are ignored, even NaN."""

    phase = Phase.LOCAL
    scope = "weigh"
    state_field = ""
    needs_local = ""
    options = ()
    asked_by = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self:
        del options
        return cls()

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the gradients, and the values reduced with them, times the weight."""
        weight = gradients.weight
        if weight is None or gradients.weighted:
            return gradients, state
        gradients = as_local(gradients, context, "weight multiplies")
        weigh = lambda leaf: to_average(leaf, weight)
        leaves, tree = jax.tree.flatten(gradients.values)
        early = gradients.early or [False] * len(leaves)
        values = [x if is_early else weigh(x) for x, is_early in zip(leaves, early, strict=True)]
        extra = jax.tree.map(weigh, dict(gradients.extra))
        return gradients.replace(values=tree.unflatten(values), extra=extra), state

    def describe(self) -> str:
        return "weigh"


@dataclasses.dataclass(frozen=True)
class Aggregate(Stage):
    """The mean or the sum over the shards, or over the group.

    With weights the mean is ``sum(w · g) / sum(w)``. ``reduction``, ``groups`` and ``axis_name``
    are for ``describe`` alone: the numbers follow the context.
    """

    reduction: Reduction
    groups: GroupAssignment | None = None
    axis_name: tuple[str, ...] = ()
    aggregator: Aggregator = dataclasses.field(default_factory=Plain)

    phase = Phase.REDUCTION
    placement = PER_SHARD
    scope = "reduce"
    state_field = "aggregate"
    options = ("reduce_dtype", "aggregator")
    asked_by = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self:
        """Return the stage.

        Raises:
          ArgumentError: no such dtype, or two ways to sum.
          ArgumentTypeError: not an aggregator.
        """
        given = options.get("reduce_dtype")
        wire = Plain() if given is None else check_reduce_dtype(given)
        aggregator = options.get("aggregator")
        if aggregator is not None and not isinstance(aggregator, Aggregator):
            raise ArgumentTypeError(
                f"aggregator must be a crossshard.pipeline.Aggregator, whose sum(values, state, "
                f"peers) sums the gradients; got {_check.described(aggregator)}."
            )
        if aggregator is not None and given is not None:
            raise ArgumentError(
                f"reduce_dtype={given!r:.60} is the dtype of crossshard's own sum, which "
                f"aggregator= replaces, as it sums {aggregator.describe()}. Leave one of them out."
            )
        shared = options["reduction"], options["groups"], options["axis_name"]
        return cls(*shared, wire if aggregator is None else aggregator)

    def init(self, params: Any) -> Any:
        return self.aggregator.init(params)

    def moved_to(self, state: PyTree, spread: PyTree, number: int) -> PyTree:
        """Return the aggregator's state on another number of shards."""
        del spread
        return self.aggregator.on_other_shards(state, number)

    def written(self) -> dict[str, Given]:
        if isinstance(self.aggregator, Plain):
            return {"reduce_dtype": self.aggregator.dtype}
        return {"aggregator": self.aggregator}

    def describe(self) -> str:
        """Describe it, as ``mean over all shards``, with the axes and the dtype if given."""
        if self.groups is not None and self.groups.size == 1:
            return "each shard its own"
        word = "sum" if self.reduction is Reduction.SUM else "mean"
        over = "all shards" if self.groups is None else f"groups {self.groups}"
        axes = f" on {', '.join(self.axis_name)}" if self.axis_name else ""
        return f"{word} over {over}{axes} {self.aggregator.describe()}".rstrip()

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the sums of gradients: in full, or this shard's slices if arrays are split."""
        # Slices have other shapes than parameters.
        has_slices = any(gradients.early) or context.arrays.params_sharded
        # Nothing is reduced on a single shard, or under the user's own jit.
        if context.params is not None and not has_slices and context.shards.num_shards > 1:
            check_shapes(gradients.values, context.params)
        divides_before, total = self.aggregator.divides_before, gradients.total_weight
        if divides_before:
            if total is None and gradients.weight is not None:
                total = sum_over_shards(gradients.weight, context.shards)
            gradients = _divide(gradients, total, context, self.aggregator)
        values = self.aggregator.each(context.arrays.to_owners)(gradients.values)
        leaves, tree = jax.tree.flatten((dict(gradients.extra), values))
        # A gradient that nothing reads counts as reduced: it is zero.
        every = context.arrays.unread or [False] * len(gradients.status)
        unread = zip(gradients.status, every, strict=True)
        known = (GradientStatus.REDUCED if is_unread else each for each, is_unread in unread)
        status = (*gradients.extra_status, *known)
        partitions = _partitions(gradients, context)
        to_send = [place for place, each in enumerate(status) if each in _TO_SUM]
        # The weight and other sums travel in the bucket of the loss.
        own_weight = gradients.weight if total is None else None
        others, other_tree = jax.tree.flatten((own_weight, dict(gradients.sums)))
        num_extra = len(gradients.extra_status)
        early = [False] * num_extra + list(gradients.early or [False] * len(gradients.status))
        index_of = lambda place: None if place < num_extra else place - num_extra
        sent = [Sent(widen(leaves[at]), partitions[at], index_of(at)) for at in to_send]
        sent += [Sent(other, unsplit(other)) for other in others]
        received, state = self.aggregator.reduce(gradients.values, sent, state, context)
        totals = dict(zip(to_send, received, strict=False))
        summed_weight, totals_of_others = other_tree.unflatten(received[len(to_send) :])
        total = summed_weight if total is None else total

        def summed(place: int, leaf: Any) -> Any:
            if place in totals:
                return totals[place]
            if status[place] is None or early[place]:
                return leaf
            own = widen(self.aggregator.one(leaf))
            return partitions[place].local_slice(own, context.shards.index_in_group())

        extra, values = tree.unflatten(list(map(summed, range(len(leaves)), leaves)))
        dtypes = gradients.dtypes
        # If all weights are zero there is no gradient, and weights must not decay either.
        skip = None if total is None else total == 0
        reduced = Gradients(
            extra,
            weight=total,
            sums=totals_of_others,
            skip=skip,
            status=status[:num_extra],
            dtypes=dtypes[:num_extra],
            divisor=context.divisor,
        )
        final = lambda each: each and (GradientStatus.REDUCED if divides_before else each)
        return reduced.replace(
            values=values,
            extra=reduced.settled().values,
            status=tuple(map(final, status[num_extra:])),
            dtypes=dtypes[num_extra:],
        ), state


def _divide(
    gradients: Gradients, total: Any, context: StageContext, aggregator: Aggregator
) -> Gradients:
    """Divide gradients by the total weight, or the number of shards: their sum is the mean.

    They have at least 32 bits.

    Raises:
      IncomingError: they are already summed.
    """
    what = "reduce_dtype sends" if isinstance(aggregator, FewBits) else "aggregator sums"
    gradients = as_local(gradients, context, what)

    def one(x: Any, status: GradientStatus | None) -> Any:
        return average(widen(x), total, context.divisor) if status is GradientStatus.LOCAL else x

    leaves, tree = jax.tree.flatten(gradients.values)
    return gradients.replace(values=tree.unflatten(map(one, leaves, gradients.status)))


# The statuses of gradients that the aggregator has to sum.
_TO_SUM = (GradientStatus.LOCAL, GradientStatus.SCALED)


def _partitions(gradients: Gradients, context: StageContext) -> list[Partition]:
    """Return the partition of each reduced leaf: as the parameter has it; a loss is replicated."""
    extra, of_gradients = gradients.extra, context.arrays.partitions_of
    found = [
        of_gradients(extra[name]) if name == "grad" else [unsplit(extra[name])]
        for name in sorted(extra)
    ]
    return [*itertools.chain(*found), *of_gradients(gradients.values)]
