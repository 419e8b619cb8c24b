"""Rows: arrays that are dealt out, each whole in the row of the shard that owns it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from crossshard.shards.partition import Partition, TileShape

Shape = tuple[int, ...]
# An array, by its place in a list, or one of its rows along the first axis.
Unit = tuple[int, int | None]


def owners_of(costs: Mapping[Unit, float], number: int) -> dict[Unit, int]:
    """Which of ``number`` shards each unit goes to: the dearest first, to who has least.

    >>> owners_of({(0, None): 5, (1, 0): 3, (1, 1): 3, (2, None): 1}, 2)
    {(0, None): 0, (1, 0): 1, (1, 1): 1, (2, None): 0}
    """
    loads, owners = [0.0] * number, {}
    for unit in sorted(costs, key=lambda unit: (-costs[unit], unit)):
        owners[unit] = loads.index(min(loads))
        loads[owners[unit]] += costs[unit]
    return owners


def take(arrays: Sequence[Any] | Mapping[int, Any], unit: Unit) -> Any:
    """A unit of these arrays."""
    place, row = unit
    return arrays[place] if row is None else arrays[place][row : row + 1]


def joined(units: Mapping[Unit, Any]) -> dict[int, Any]:
    """The arrays of which all units are given."""
    found = {}
    for place, own in itertools.groupby(sorted(units), lambda unit: unit[0]):
        parts = [units[unit] for unit in own]
        found[place] = parts[0] if (place, None) in units else jnp.concatenate(parts)
    return found


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays of one dtype in a matrix, of which each shard has the row with those that it owns.

    Attributes:
      dtype: their dtype.
      shapes: the shape of each unit.
      of_shard: for each shard its units, in their order.
      tile: the smallest slice that the platform scatters efficiently.
    """

    dtype: Any
    shapes: Mapping[Unit, Shape]
    of_shard: tuple[tuple[Unit, ...], ...]
    tile: TileShape

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """The places of the arrays in a list; at the first of them stands the matrix."""
        return tuple(sorted({place for place, _ in self.shapes}))

    @property
    def first(self) -> int:
        """The place of the matrix."""
        return self.places[0]

    @functools.cached_property
    def width(self) -> int:
        """The elements of a row, with its padding."""
        widest = max(sum(math.prod(self.shapes[unit]) for unit in own) for own in self.of_shard)
        return widest + self.tile.padding(widest)

    @property
    def partition(self) -> Partition:
        """How the matrix is split into the rows."""
        # XLA for TPUs scatters only what has many short rows.
        lanes = self.tile.lanes if self.tile.size > 1 else self.width
        number = len(self.of_shard)
        return Partition((number * (self.width // lanes), lanes), number, 0, self.tile)

    def row(self, shard: int, units: Mapping[Unit, Any], dtype: Any = None) -> jax.Array:
        """The row of a shard, from its units; of another dtype, if all have it."""
        parts = [jnp.ravel(units[unit]) for unit in self.of_shard[shard]]
        padding = self.width - sum(part.size for part in parts)
        flat = jnp.concatenate([*parts, jnp.zeros(padding, dtype or self.dtype)])
        return flat.reshape(self.partition.local_shape)

    def units(self, shard: int, row: jax.Array) -> dict[Unit, jax.Array]:
        """The inverse of ``row``."""
        found, start, flat = {}, 0, row.ravel()
        for unit in self.of_shard[shard]:
            end = start + math.prod(self.shapes[unit])
            found[unit] = flat[start:end].reshape(self.shapes[unit])
            start = end
        return found


def rows_of(
    types: Mapping[Unit, Any],
    owners: Mapping[Unit, int],
    number: int,
    tile: TileShape,
    most: float = math.inf,
) -> tuple[Rows, ...]:
    """The rows of units, one matrix for each dtype.

    Args:
      types: the type of each unit.
      owners: the shard that owns it.
      number: the number of shards.
      tile: the smallest slice that the platform scatters efficiently.
      most: how many bytes a row may have before another matrix begins.
    """
    found = []
    for dtype in sorted({x.dtype for x in types.values()}, key=str):
        left = {unit: x for unit, x in types.items() if x.dtype == dtype}
        while left:
            bytes_of, taken = [0] * number, list[list[Unit]]([] for _ in range(number))
            # An array stays in one matrix with all of its rows.
            for _, own in itertools.groupby(sorted(left), lambda unit: unit[0]):
                more, units = list(bytes_of), list(own)
                for unit in units:
                    size = math.prod(left[unit].shape) * left[unit].dtype.itemsize
                    more[owners[unit]] += size
                if any(bytes_of) and max(more) > most:
                    continue
                bytes_of = more
                for unit in units:
                    taken[owners[unit]].append(unit)
            shapes = {unit: tuple(left.pop(unit).shape) for own in taken for unit in own}
            found.append(Rows(dtype, shapes, tuple(map(tuple, taken)), tile))
    return tuple(found)


def pack(rows: Iterable[Rows], arrays: Sequence[Any]) -> list[Any]:
    """A list of whole arrays, with the matrix of all rows in the place of the first of them."""
    found = list(arrays)
    for each in rows:
        given = {unit: take(arrays, unit) for unit in each.shapes}
        dtype = jnp.result_type(*(arrays[place] for place in each.places))
        own = [each.row(shard, given, dtype) for shard in range(len(each.of_shard))]
        found = put(each, found, jnp.concatenate(own))
    return found


def pack_own(rows: Iterable[Rows], arrays: Sequence[Any], index: jax.Array) -> list[Any]:
    """As ``pack``, with the row of the shard at ``index`` alone."""
    found = list(arrays)
    for each in rows:
        most = max(map(len, each.of_shard))
        table = np.zeros((len(each.of_shard), most), np.int32)
        for shard, own in enumerate(each.of_shard):
            table[shard, : len(own)] = [row or 0 for _, row in own]
        which = jnp.asarray(table)[index]

        def row(shard: int, each: Rows = each, which: jax.Array = which) -> jax.Array:
            own = {}
            for nth, unit in enumerate(each.of_shard[shard]):
                x = arrays[unit[0]]
                sliced = functools.partial(lax.dynamic_slice_in_dim, x, which[nth], 1)
                own[unit] = x if unit[1] is None else sliced()
            return each.row(shard, own)

        found = put(each, found, on_owner(places_of(each.of_shard), index, row))
    return found


def places_of(of_shard: Sequence[Sequence[Unit]]) -> list[tuple[int, ...]]:
    """The arrays of which each shard owns units."""
    return [tuple(place for place, _ in own) for own in of_shard]


def on_owner(kinds: Sequence[Hashable], index: jax.Array, function: Callable[[int], Any]) -> Any:
    """``function(index)`` of a shard, compiled once for all shards of a kind."""
    first = {kind: shard for shard, kind in reversed(list(enumerate(kinds)))}
    branches = [functools.partial(function, shard) for shard in first.values()]
    branch_of = [list(first).index(kind) for kind in kinds]
    return lax.switch(jnp.asarray(branch_of)[index], branches)


def unpack(rows: Iterable[Rows], arrays: Sequence[Any]) -> list[Any]:
    """The inverse of ``pack``."""
    found = list(arrays)
    for each in rows:
        units: dict[Unit, Any] = {}
        for shard, row in enumerate(jnp.split(arrays[each.first], len(each.of_shard))):
            units |= each.units(shard, row)
        for place, x in joined(units).items():
            found[place] = x
    return found


def put(rows: Rows, arrays: Sequence[Any], matrix: Any) -> list[Any]:
    """The list with a matrix, or a row of it, in the place of the arrays; empty ones follow it."""
    found = list(arrays)
    for place in rows.places:
        found[place] = jnp.zeros(0, matrix.dtype)
    found[rows.first] = matrix
    return found


def in_rows(rows: Iterable[Rows], partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """The partitions of a list of arrays, of which those that are dealt out are in rows."""
    found = list(partitions)
    for each in rows:
        for place in each.places:
            found[place] = Partition((0,))
        found[each.first] = each.partition
    return tuple(found)
