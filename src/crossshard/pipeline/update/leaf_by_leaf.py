"""Leaf by leaf: runs an update whose leaves are cut, or dealt out to their owners."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.collectives.all_reduce import widen
from crossshard.collectives.bucketing import bucketed_sum
from crossshard.collectives.owners import at_owner, by_owner, from_owners, of_unit, to_owners
from crossshard.collectives.scatter import turn
from crossshard.gradients.scalars import is_inexact
from crossshard.jaxprs.pieces import Pieces
from crossshard.jaxprs.repeats import alone
from crossshard.pipeline.update.dealt import Dealt
from crossshard.shards.axes import Shards
from crossshard.shards.partition import Partition
from crossshard.shards.rows import Rows, Unit, on_owner, places_of, put

# Arrays by their places among the inputs, or the outputs, of the jaxpr of an update.
Values = Mapping[int, Any]


def update_leaf_by_leaf(
    dealt: Dealt,
    shards: Shards,
    gradients: Sequence[Any],
    state: Sequence[Any],
    params: Sequence[Any],
    extra: Sequence[Any],
    never: jax.Array | None = None,
) -> tuple[list[Any], list[Any]]:
    """The updates and the optimizer's next state, arranged as the parameters and the state are.

    Args:
      dealt: how leaves are cut, and who owns which.
      shards: the shards.
      gradients: this shard's slices and rows of the reduced gradients.
      state: this shard's slices and rows of the state.
      params: this shard's slices and rows of the parameters.
      extra: further arguments of the update.
      never: bool[], not set, which XLA does not know, to compile each leaf apart from the others.
    """
    return _Update(dealt, shards, gradients, state, params, extra, never).run()


class _Update:
    """One update, on one shard."""

    def __init__(
        self,
        dealt: Dealt,
        shards: Shards,
        gradients: Sequence[Any],
        state: Sequence[Any],
        params: Sequence[Any],
        extra: Sequence[Any],
        never: jax.Array | None,
    ):
        self._never = never
        self._dealt, self._shards, self._leafwise = dealt, shards, dealt.leafwise
        self._jaxpr, self._index = dealt.leafwise.jaxpr, shards.index()
        self._pieces = Pieces(self._jaxpr)
        self._params, self._state = params, state
        # The places of the state, and of what comes after it.
        self._of_state, self._after = len(params), len(params) + len(state)
        self._common = [i for i in range(len(params)) if i not in dealt.owned]
        self._common_state = [
            j for j, leaf in enumerate(self._leafwise.of_state) if leaf not in dealt.owned
        ]
        # What every shard has; and what owners have, as functions of a shard, with the leaf of each
        # array and the place of the first.
        self._inputs: dict[int, Any] = {}
        self._of_owners: list[
            tuple[Callable[[int], Mapping[Unit, Any]], Sequence[int | None], int]
        ] = []
        self._take(params, 0)
        self._take(gradients, self._after)
        for j in self._common_state:
            self._inputs[self._of_state + j] = state[j]
        for rows in dealt.state_rows:
            own = functools.partial(rows.units, row=state[rows.first])
            self._of_owners.append((own, self._leafwise.of_state, self._of_state))
        for place, x in enumerate(extra, self._after + len(params)):
            self._inputs[place] = self._typed(place, x)
        self._mask()

    def _take(self, arrays: Sequence[Any], start: int) -> None:
        """Arrays like the parameters: those of leaves that are cut, and those that owners get."""
        dealt = self._dealt
        for i in self._common:
            x, axis = arrays[i], dealt.turned(i)
            x = turn(x, 0, axis, self._shards) if axis else x
            self._inputs[start + i] = self._typed(start + i, x)
        for rows in dealt.rows:
            own = functools.partial(rows.units, row=arrays[rows.first])
            self._of_owners.append((own, range(len(arrays)), start))
        if not self._read_by_owners(start):
            return
        for rows in dealt.rows_of_slices([jnp.result_type(x) for x in arrays]):
            received = to_owners(rows, {i: arrays[i] for i in rows.places}, self._shards)
            own = functools.partial(at_owner, rows, dealt.params, received=received)
            self._of_owners.append((own, range(len(arrays)), start))

    def _read_by_owners(self, start: int) -> bool:
        """Whether owners read slices of these arrays, of which the first is at ``start``."""
        leaves = {leaf for leaf, _ in self._dealt.exchanged}
        if not leaves:
            return False
        of_state = [j for j, leaf in enumerate(self._leafwise.of_state) if leaf in leaves]
        scalars = [k for k, each in enumerate(self._leafwise.scalars) if each.leaf in leaves]
        places = [*leaves, *(self._of_state + j for j in of_state)]
        piece = self._pieces.of([*places, *(self._after + k for k in scalars)])
        return any(start + i in piece.taken for i in leaves)

    def _typed(self, place: int, x: Any) -> jax.Array:
        return jnp.asarray(x, self._jaxpr.in_avals[place].dtype)

    def _mask(self) -> None:
        """What tells the elements of this shard's slices from their padding."""
        masks = self._leafwise.masks
        for place, leaf in enumerate(masks, len(self._jaxpr.in_avals) - len(masks)):
            shape, partition = self._jaxpr.in_avals[place].shape, self._dealt.params[leaf]
            size = math.prod(partition.local_shape)
            own = math.prod(partition.shape) - self._index * size
            self._inputs[place] = (jnp.arange(size) < own).reshape(shape)

    def run(self) -> tuple[list[Any], list[Any]]:
        """The updates, and the next state."""
        for level in sorted({each.level for each in self._leafwise.scalars}):
            self._sum_scalars(level)
        updates, after = list(self._params), list(self._state)
        found: dict[int, Any] = {}
        for leaf, outputs in self._of_common():
            run = self._layer_by_layer if leaf in self._leafwise.stacked else self._computed
            found |= run(outputs, self._inputs)
        for i in self._common:
            axis = self._dealt.turned(i)
            updates[i] = turn(found[i], axis, 0, self._shards) if axis else found[i]
        for j in self._common_state:
            after[j] = found[self._of_state + j]
        return self._of_owned(updates, after) if self._dealt.owned else (updates, after)

    def _of_common(self) -> list[tuple[int | None, list[int]]]:
        """The places of what every shard computes: all at once, or of each leaf and of none."""
        if self._never is None:
            every = [*self._common, *(self._of_state + j for j in self._common_state)]
            return [(None, every)]
        of_none = [j for j in self._common_state if self._leafwise.of_state[j] is None]
        return [
            *((leaf, self._outputs_of(leaf)) for leaf in self._common),
            (None, [self._of_state + j for j in of_none]),
        ]

    def _layer_by_layer(self, outputs: Sequence[int], inputs: Values) -> dict[int, Any]:
        """As ``_computed``, for a leaf of which the update takes one layer."""
        leaf = outputs[0]
        own = [*outputs, self._after + leaf]
        layers = {place: inputs[place][:, None] for place in own}

        def one(_: None, layer: dict[int, Any]) -> tuple[None, dict[int, Any]]:
            return None, self._computed(outputs, {**inputs, **layer})

        _, found = lax.scan(one, None, layers)
        return {place: x[:, 0] for place, x in found.items()}

    def _of_owned(
        self, updates: Sequence[Any], after: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The updates and the state with those that owners compute."""
        dealt, types = self._dealt, self._jaxpr.out_avals
        slices = dealt.rows_of_slices([x.dtype for x in types])

        def own(shard: int) -> tuple[list[Any], list[Any], list[Any]]:
            found: dict[Unit, Any] = {}
            kept: dict[Unit, Any] = {}
            for (leaf, row), inputs in self._owned_by(shard).items():
                new = self._computed(self._outputs_of(leaf), inputs)
                found[leaf, row] = new.pop(leaf)
                kept |= {(place - self._of_state, row): x for place, x in new.items()}
            return (
                [rows.row(shard, found, types[rows.first].dtype) for rows in dealt.rows],
                [by_owner(rows, dealt.params, shard, found) for rows in slices],
                [rows.row(shard, kept) for rows in dealt.state_rows],
            )

        kinds = [self._kind(shard, slices) for shard in range(dealt.number)]
        whole, sent, kept = on_owner(kinds, self._index, own)
        updates, after = list(updates), list(after)
        for rows, row in zip(dealt.rows, whole, strict=True):
            updates = put(rows, updates, row)
        for rows, each in zip(slices, sent, strict=True):
            for i, x in from_owners(rows, each, self._shards).items():
                updates[i] = x
        for rows, row in zip(dealt.state_rows, kept, strict=True):
            after = put(rows, after, row)
        return updates, after

    def _outputs_of(self, leaf: int) -> list[int]:
        """The places of a leaf's update, and of its state."""
        of_state = [j for j, own in enumerate(self._leafwise.of_state) if own == leaf]
        return [leaf, *(self._of_state + j for j in of_state)]

    def _kind(self, shard: int, slices: Sequence[Rows]) -> Hashable:
        """The same for owners that compute the same, of arrays that lie alike in their rows."""
        own, leaf_of = self._dealt.of_shard[shard], self._leafwise.of_state
        number = {unit: nth for nth, unit in enumerate(own)}

        def computed(unit: Unit) -> Hashable:
            leaf = unit[0]
            piece = self._pieces.of(self._outputs_of(leaf))
            first = self._after + leaf
            mine = {leaf: "param", first: "gradient"} | {
                place: nth for nth, place in enumerate(self._outputs_of(leaf)[1:])
            }
            inputs = tuple(mine.get(place, (place,)) for place in piece.taken)
            return piece.text, inputs, of_unit(self._dealt.params, unit)

        of_params = [
            [(number[unit], rows.shapes[unit]) for unit in rows.of_shard[shard]]
            for rows in (*self._dealt.rows, *slices)
        ]
        of_state = []
        for rows in self._dealt.state_rows:
            for unit in rows.of_shard[shard]:
                leaf = leaf_of[unit[0]]
                assert leaf is not None
                nth = self._outputs_of(leaf).index(self._of_state + unit[0])
                of_state.append((rows.first, number[leaf, unit[1]], nth, rows.shapes[unit]))
        return tuple(map(computed, own)), str(of_params), tuple(of_state)

    def _owned_by(self, shard: int) -> dict[Unit, dict[int, Any]]:
        """All inputs for each unit that a shard owns."""
        found = {unit: dict(self._inputs) for unit in self._dealt.of_shard[shard]}
        for units_of, leaf_of, start in self._of_owners:
            for (place, row), x in units_of(shard).items():
                leaf = leaf_of[place]
                assert leaf is not None
                found[leaf, row][start + place] = self._typed(start + place, x)
        return found

    def _sum_scalars(self, level: int) -> None:
        """Compute what leaves have in common at this level, and give it to all shards."""
        dealt, scalars = self._dealt, self._leafwise.scalars
        first = len(self._jaxpr.in_avals) - len(self._leafwise.masks) - len(scalars)
        now = [k for k, each in enumerate(scalars) if each.level == level]
        of_owners = [k for k in now if scalars[k].leaf in dealt.owned]
        of_all = [k for k in now if scalars[k].leaf not in dealt.owned]
        types = {k: self._jaxpr.out_avals[self._after + k] for k in now}
        leaves = [[k for k in of_all if scalars[k].leaf == leaf] for leaf in self._common]
        parts: dict[int, Any] = {}
        for own in leaves if self._never is not None else [of_all]:
            parts |= self._computed([self._after + k for k in own], self._inputs)
        # A leaf that is not cut has all of it.
        done = [k for k in of_all if not scalars[k].reduced]
        self._inputs |= {first + k: parts[self._after + k] for k in done}
        of_all = [k for k in of_all if scalars[k].reduced]

        def of_owner(shard: int) -> list[Any]:
            found = {k: _summand(jnp.zeros(types[k].shape, types[k].dtype)) for k in of_owners}
            for (leaf, _), inputs in self._owned_by(shard).items():
                mine = [k for k in of_owners if scalars[k].leaf == leaf]
                new = self._computed([self._after + k for k in mine], inputs)
                for k in mine:
                    found[k] += _summand(new[self._after + k], scalars[k].reduced)
            return list(found.values())

        summands = [_summand(parts[self._after + k], scalars[k].reduced) for k in of_all]
        if of_owners:
            summands += on_owner(places_of(dealt.of_shard), self._index, of_owner)
        sums = bucketed_sum(summands, [Partition(x.shape) for x in summands], self._shards)
        for k, total in zip([*of_all, *of_owners], sums, strict=True):
            is_and = scalars[k].reduced == "reduce_and"
            self._inputs[first + k] = total == 0 if is_and else total.astype(types[k].dtype)

    def _computed(self, outputs: Sequence[int], inputs: Values) -> dict[int, Any]:
        """Some outputs of the update, by their places."""
        if not outputs:
            return {}
        piece = self._pieces.of(outputs)
        given = [inputs[i] for i in piece.taken]
        found = piece.run(*given) if self._never is None else alone(piece.run, given, self._never)
        return dict(zip(outputs, found, strict=True))


def _summand(x: jax.Array, reduced: str = "") -> jax.Array:
    """A scalar as it is summed; of flags that all must hold, those that do not."""
    if is_inexact(x):
        return widen(x)
    x = ~x if reduced == "reduce_and" else x
    return x.astype(jnp.int32) if x.dtype == bool else x
