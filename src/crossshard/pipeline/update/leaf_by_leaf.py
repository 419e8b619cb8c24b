"""Leaf by leaf: runs an update whose leaves are cut, or dealt out to their owners."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.collectives.all_reduce import widen
from crossshard.collectives.bucketing import bucketed_gather, bucketed_sum
from crossshard.collectives.in_order import sum_of_nodes
from crossshard.collectives.owners import at_owner, by_owner, from_owners, of_unit, to_owners
from crossshard.collectives.scatter import turn
from crossshard.gradients.scalars import is_inexact
from crossshard.jaxprs.rewrite import Pieces, alone
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
        found = self._of_common()
        for i in self._common:
            axis = self._dealt.turned(i)
            updates[i] = turn(found[i], axis, 0, self._shards) if axis else found[i]
        for j in self._common_state:
            after[j] = found[self._of_state + j]
        return self._of_owned(updates, after) if self._dealt.owned else (updates, after)

    def _of_common(self) -> dict[int, Any]:
        """What shards compute of leaves that have no owner: all at once, or leaf by leaf."""
        if self._never is None:
            every = [*self._common, *(self._of_state + j for j in self._common_state)]
            return self._computed(every, self._inputs)
        of_none = [j for j in self._common_state if self._leafwise.of_state[j] is None]
        found = self._computed([self._of_state + j for j in of_none], self._inputs)
        for leaf in self._common:
            outputs = self._outputs_of(leaf)
            if leaf not in self._dealt.pieces:
                found |= self._computed(outputs, self._inputs)
                continue
            axis, _ = self._dealt.pieces[leaf]
            new = self._in_pieces(leaf, outputs)
            found |= {place: _joined(x, axis) for place, x in new.items()}
        return found

    def _in_pieces(self, leaf: int, outputs: Sequence[int]) -> dict[int, Any]:
        """``[pieces, …]``: as ``_computed``, of each piece that this shard has of a leaf."""
        axis, length = self._dealt.pieces[leaf]
        own = [*self._outputs_of(leaf), self._after + leaf]
        pieces = {place: _cut(self._inputs[place], axis, length) for place in own}

        def one(_: None, piece: dict[int, Any]) -> tuple[None, dict[int, Any]]:
            return None, self._computed(outputs, {**self._inputs, **piece})

        return dict(lax.scan(one, None, pieces)[1])

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

        def own(shard: int) -> list[Any]:
            found = {k: _summand(self._no_parts(k, types[k])) for k in of_owners}
            for (leaf, row), inputs in self._owned_by(shard).items():
                mine = [k for k in of_owners if scalars[k].leaf == leaf]
                new = self._computed([self._after + k for k in mine], inputs)
                for k in mine:
                    part = _summand(new[self._after + k], scalars[k].reduced)
                    if self._never is None:
                        found[k] += part
                    else:
                        found[k] = found[k].at[row or 0].set(part)
            return list(found.values())

        summed, whole = of_all, dict[int, Any]()
        if self._never is None:
            parts = self._computed([self._after + k for k in of_all], self._inputs)
            summands = [_summand(parts[self._after + k], scalars[k].reduced) for k in of_all]
        else:
            summed, summands, whole = [], [], self._parts_of_all(of_all)
        if of_owners:
            summands += on_owner(places_of(dealt.of_shard), self._index, own)
        sums = bucketed_sum(summands, [Partition(x.shape) for x in summands], self._shards)
        whole |= dict(zip([*summed, *of_owners], sums, strict=True))
        for k, total in whole.items():
            # One after the other, whatever shards they come from.
            total = total if self._never is None else sum_of_nodes(total)
            is_and = scalars[k].reduced == "reduce_and"
            self._inputs[first + k] = total == 0 if is_and else total.astype(types[k].dtype)

    def _no_parts(self, scalar: int, like: Any) -> jax.Array:
        """Zero; or ``[layers]``, or ``[1]``, for what each layer gives to the scalar."""
        leaf = self._leafwise.scalars[scalar].leaf
        layers = self._dealt.types[0][leaf].shape[0] if leaf in self._leafwise.stacked else 1
        shape = like.shape if self._never is None else (layers, *like.shape)
        return jnp.zeros(shape, like.dtype)

    def _parts_of_all(self, scalars: Sequence[int]) -> dict[int, Any]:
        """``[pieces, …]``: what each piece of leaves that have no owner gives to each scalar."""
        found: dict[int, Any] = {}
        for leaf in self._common:
            mine = [k for k in scalars if self._leafwise.scalars[k].leaf == leaf]
            outputs = [self._after + k for k in mine]
            if mine and leaf in self._dealt.pieces:
                assert all(self._leafwise.scalars[k].reduced for k in mine)
                new = self._in_pieces(leaf, outputs)
            else:
                new = {k: x[None] for k, x in self._computed(outputs, self._inputs).items()}
            for k in mine:
                found[k] = _summand(new[self._after + k], self._leafwise.scalars[k].reduced)

        def partition(k: int) -> Partition:
            leaf, x = self._leafwise.scalars[k].leaf, found[k]
            number = self._dealt.params[leaf].number
            return Partition((number * len(x), *x.shape[1:]), number)

        whole = bucketed_gather(list(found.values()), list(map(partition, found)), self._shards)
        return dict(zip(found, whole, strict=True))

    def _computed(self, outputs: Sequence[int], inputs: Values) -> dict[int, Any]:
        """Some outputs of the update, by their places."""
        if not outputs:
            return {}
        piece = self._pieces.of(outputs)
        given = [inputs[i] for i in piece.taken]
        found = piece.run(*given) if self._never is None else alone(piece.run, given, self._never)
        return dict(zip(outputs, found, strict=True))


def _cut(x: jax.Array, axis: int, length: int) -> jax.Array:
    """``[pieces, …]``: the pieces of an array along an axis."""
    shape = x.shape[:axis], (x.shape[axis] // length, length), x.shape[axis + 1 :]
    return jnp.moveaxis(x.reshape(sum(shape, ())), axis, 0)


def _joined(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of ``_cut``."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _summand(x: jax.Array, reduced: str = "") -> jax.Array:
    """A scalar as it is summed; of flags that all must hold, those that do not."""
    if is_inexact(x):
        return widen(x)
    x = ~x if reduced == "reduce_and" else x
    return x.astype(jnp.int32) if x.dtype == bool else x
