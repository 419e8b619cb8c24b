"""Outer: every so many steps the workers' parameters become one again, by an outer optimizer.

Local SGD (Stich 2019, arXiv 1805.09767) and DiLoCo (Douillard et al. 2023, arXiv 2311.08105).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard._annotations import PyTree
from crossshard.collectives.bucketing import bucketed_sum
from crossshard.collectives.sums import wide, widen
from crossshard.gradients.nesting import inside_optimizer
from crossshard.pipeline.aggregators.aggregator import Peers
from crossshard.pipeline.aggregators.few_bits import FewBits
from crossshard.pipeline.aggregators.plain import Plain
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext
from crossshard.pipeline.update.arrays import Arrays, Parts
from crossshard.pipeline.update.optimize import Updated
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition
from crossshard.shards.placement import PER_SHARD, REPLICATED


class OuterState(NamedTuple):
    """What all workers have in common.

    Attributes:
      anchor: the parameters after the last synchronisation, with at least 32 bits.
      inner_state: the state of the outer optimizer.
      count: int32[], the number of steps so far, skipped ones among them.
      aggregate: the state of the outer sum, one per shard.
    """

    anchor: PyTree
    inner_state: PyTree
    count: PyTree
    aggregate: PyTree = ()


@dataclasses.dataclass(frozen=True)
class Outer(Stage):
    """Synchronises the workers: each is a group of shards, and has parameters of its own.

    The pseudogradient of a worker is the anchor less its parameters. The outer optimizer updates
    the anchor with the mean over the workers, and all go on from there.

    Attributes:
      every: the number of steps from one synchronisation to the next.
      optimizer: the outer optimizer.
      aggregator: what sums the pseudogradients.
    """

    every: int
    optimizer: optax.GradientTransformationExtraArgs
    aggregator: Plain | FewBits

    phase = Phase.UPDATE
    scope = "outer"
    state_field = "outer"

    def init(self, params: PyTree) -> OuterState:
        """The state before the first step, of which the anchor is the parameters."""
        anchor = as_anchor(params)
        with inside_optimizer():
            inner_state = self.optimizer.init(anchor)
        return OuterState(anchor, inner_state, jnp.int32(0), self.aggregator.init(anchor))

    def placements(self, state: OuterState) -> OuterState:
        """All shards have the same, but for what the sum keeps."""
        of_all = jax.tree.map(lambda _: REPLICATED, state)
        own = jax.tree.map(lambda _: PER_SHARD, state.aggregate)
        return of_all._replace(aggregate=own)

    def update(
        self, gradients: Gradients, state: OuterState, context: StageContext
    ) -> tuple[Gradients, OuterState]:
        """The updated parameters, synchronised if it is time, and the next state."""
        assert gradients.updated is not None
        updated = gradients.updated
        state = state._replace(count=optax.safe_increment(context.agreed(state.count)))

        def synchronise(_: PyTree, state: OuterState) -> tuple[PyTree, OuterState]:
            moved = self._moved(updated, state, context)
            mean, aggregate = self._mean(moved, context.arrays, state.aggregate, context)
            with inside_optimizer():
                updates, inner_state = self.optimizer.update(mean, state.inner_state, state.anchor)
            anchor = optax.apply_updates(state.anchor, updates)
            params = jax.tree.map(lambda x, p: x.astype(p.dtype), anchor, updated.result)
            return params, OuterState(anchor, inner_state, state.count, aggregate)

        is_due = state.count % self.every == 0
        keep = lambda params, state: (params, state)
        result, after = lax.cond(is_due, synchronise, keep, updated.result, state)
        return gradients.replace(updated=updated._replace(result=result)), after

    @staticmethod
    def _moved(updated: Updated, state: OuterState, context: StageContext) -> PyTree:
        """The pseudogradient of this shard's worker, split as the optimizer's arrays are."""
        # Of what every worker began with, which may have fewer bits than the anchor.
        rounded = jax.tree.map(lambda x, p: x.astype(p.dtype), state.anchor, updated.result)
        start = context.arrays.split(rounded)
        # Not of the updated parameters, which are rounded: right after a synchronisation it is
        # the update itself.
        one = lambda start, before, update: -((widen(before) - widen(start)) + widen(update))
        return jax.tree.map(one, start, updated.params, updated.updates)

    def _mean(
        self, moved: PyTree, arrays: Arrays, state: PyTree, context: StageContext
    ) -> tuple[PyTree, PyTree]:
        """The mean over the workers, in full, and the next state of the aggregator."""
        shards, groups = context.shards, context.groups
        if groups is None:
            return arrays.gather(moved), state
        across = Peers(shards.within(_across(groups)))
        mean = lambda tree: jax.tree.map(lambda x: x / len(groups.groups), tree)
        aggregator = self.aggregator
        # Of slices, which the shards of a worker have, each sums its own.
        if isinstance(aggregator, Plain):
            return arrays.gather(mean(aggregator.sum(moved, (), across)[0])), state
        # What a worker holds back is the sum of what its shards keep, so that the sum over all
        # shards is that over the workers, whatever their number.
        take, keep = _times(groups.size), _times(1 / groups.size)
        if isinstance(arrays, Parts):
            take = functools.partial(_slices_of_held, arrays)
            keep = functools.partial(_held_of_slices, arrays)
        total, after = aggregator.sum(mean(moved), aggregator.change_held(state, take), across)
        return arrays.gather(total), aggregator.change_held(after, keep)

    def describe(self) -> str:
        """How often, and how it is sent."""
        sent = self.aggregator.describe()
        often = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"{often} the mean over the workers{f' {sent}' * bool(sent)}, and the outer update"


def as_anchor(params: PyTree) -> PyTree:
    """The parameters with at least 32 bits."""
    # Copied, since two arrays of a donated state must not share a buffer.
    copy = lambda p: jnp.array(p, wide(jnp.result_type(p)), copy=True)
    return jax.tree.map(copy, params)


def _slices_of_held(arrays: Parts, held: PyTree) -> PyTree:
    """This shard's slices of what the shards of its worker hold back together."""
    assert arrays.groups is not None
    leaves, tree = jax.tree.flatten(held, is_leaf=_is_none)
    pairs = [each for each in zip(leaves, arrays.params, strict=True) if each[0] is not None]
    kept, partitions = [x for x, _ in pairs], [partition for _, partition in pairs]
    sums = iter(bucketed_sum(kept, partitions, arrays.shards.within(arrays.groups)))
    return tree.unflatten([None if x is None else next(sums) for x in leaves])


def _held_of_slices(arrays: Parts, held: PyTree) -> PyTree:
    """What this shard holds back, in full: its slices, and its part of what is not split."""
    groups = arrays.groups
    assert groups is not None
    index = arrays.shards.within(groups).position()

    def one(x: jax.Array | None, partition: Partition) -> jax.Array | None:
        if x is None or partition.number == 1:
            return None if x is None else x / groups.size
        axis = partition.axis or 0
        whole = jnp.zeros(partition.packed_shape, x.dtype)
        start = index * x.shape[axis]
        return partition.unpack(lax.dynamic_update_slice_in_dim(whole, x, start, axis))

    leaves, tree = jax.tree.flatten(held, is_leaf=_is_none)
    return tree.unflatten(list(map(one, leaves, arrays.params)))


def _is_none(x: object) -> bool:
    return x is None


def _times(factor: float) -> Callable[[PyTree], PyTree]:
    return lambda tree: jax.tree.map(lambda x: x * factor, tree)


def _across(groups: GroupAssignment) -> GroupAssignment | None:
    """The shards with the same position in their groups; ``None`` if these are all shards."""
    if groups.size == 1:
        return None
    return GroupAssignment(tuple(map(tuple, groups.members.T.tolist())))
