"""Dealt: which shard updates which leaf, and how arrays rest and travel for it."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from crossshard.collectives.owners import of_unit
from crossshard.jaxprs.leafwise import Leafwise
from crossshard.shards import rows
from crossshard.shards.partition import Partition, TileShape, partition_along_axis
from crossshard.shards.rows import Rows, Unit

Types = tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True)
class Dealt:
    """An update leaf by leaf: some leaves are cut, and the others have owners.

    Attributes:
      leafwise: how the update runs leaf by leaf.
      owners: the shard that updates each leaf that is not cut, or each of its layers.
      params: the partition of each parameter, as its gradient arrives and its new value travels.
        An owner's leaves that arrive whole, in rows, have none.
      types: the types of the parameters, and of the arrays of the optimizer's state.
      number: the number of shards.
      tile: the smallest slice that the platform scatters efficiently.
      pieces: for leaves that are computed piece by piece, or layer by layer, so that each piece is
        the same for any number of shards: along which axis, and the length of a piece.
    """

    leafwise: Leafwise
    owners: dict[Unit, int]
    params: tuple[Partition, ...]
    types: tuple[Types, Types]
    number: int
    tile: TileShape
    pieces: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)

    @functools.cached_property
    def owned(self) -> frozenset[int]:
        """The leaves that have owners."""
        return frozenset(leaf for leaf, _ in self.owners)

    @functools.cached_property
    def of_shard(self) -> tuple[tuple[Unit, ...], ...]:
        """What each shard owns."""
        found: list[list[Unit]] = [[] for _ in range(self.number)]
        for unit, owner in sorted(self.owners.items()):
            found[owner].append(unit)
        return tuple(map(tuple, found))

    def turned(self, leaf: int) -> int:
        """The axis along which the slices of a leaf arrive that are updated along the first; or 0.

        Gradients of stacked layers are summed layer by layer, and updated layer by layer.
        """
        stacked = leaf in self.leafwise.stacked and leaf not in self.owned
        return (self.params[leaf].axis or 0) if stacked else 0

    # Parameters and gradients.

    @functools.cached_property
    def rows(self) -> tuple[Rows, ...]:
        """The rows of the parameters that travel whole, to and from their owners."""
        types = {unit: self._type(0, unit) for unit in self.owners if not self._is_split(unit)}
        return rows.rows_of(types, self.owners, self.number, self.tile, _WINDOW)

    @functools.cached_property
    def arranged(self) -> tuple[Partition, ...]:
        """The partitions of the parameters, with those that travel whole in rows."""
        return rows.in_rows(self.rows, self.params)

    @functools.cached_property
    def exchanged(self) -> tuple[Unit, ...]:
        """The parameters of which each shard sends its slice to the owner."""
        return tuple(filter(self._is_split, sorted(self.owners)))

    def _is_split(self, unit: Unit) -> bool:
        return self.params[unit[0]].number > 1

    def rows_of_slices(self, dtypes: Sequence[Any]) -> tuple[Rows, ...]:
        """What a shard sends of its slices of arrays like the parameters: a row to each owner."""
        types = {
            unit: jax.ShapeDtypeStruct(of_unit(self.params, unit).local_shape, dtypes[unit[0]])
            for unit in self.exchanged
        }
        return rows.rows_of(types, self.owners, self.number, _PLAIN)

    # The state.

    @functools.cached_property
    def owners_of_state(self) -> dict[Unit, int]:
        """The shard that owns each array of the state, or each of its layers."""
        of_leaf: dict[int, list[Unit]] = {}
        for unit in sorted(self.owners):
            of_leaf.setdefault(unit[0], []).append(unit)
        return {
            (place, unit[1]): self.owners[unit]
            for place, leaf in enumerate(self.leafwise.of_state)
            for unit in of_leaf.get(-1 if leaf is None else leaf, ())
        }

    @functools.cached_property
    def state_rows(self) -> tuple[Rows, ...]:
        """The rows in which the state of owners rests."""
        types = {unit: self._type(1, unit) for unit in self.owners_of_state}
        return rows.rows_of(types, self.owners_of_state, self.number, self.tile)

    def _type(self, which: int, unit: Unit) -> jax.ShapeDtypeStruct:
        """The type of a unit of the parameters, or of the state."""
        whole = self.types[which][unit[0]]
        shape = whole.shape if unit[1] is None else (1, *whole.shape[1:])
        return jax.ShapeDtypeStruct(shape, whole.dtype)

    @functools.cached_property
    def state(self) -> tuple[Partition, ...]:
        """The partition of each array of the state, as it rests."""
        whole = tuple(Partition(x.shape) for x in self.types[1])
        return rows.in_rows(self.state_rows, self._of_state(whole))

    @functools.cached_property
    def collected(self) -> tuple[Partition, ...]:
        """The partition of each array of the state, with those of owners in their own shapes."""
        slices = lambda x: partition_along_axis(x.shape, self.number, self.tile)
        return self._of_state(tuple(map(slices, self.types[1])))

    def _of_state(self, of_owners: Sequence[Partition]) -> tuple[Partition, ...]:
        def one(place: int, leaf: int | None) -> Partition:
            shape = self.types[1][place].shape
            if leaf is None:
                return Partition(shape)
            if leaf in self.owned:
                return of_owners[place]
            if self.params[leaf].number == 1:
                return Partition(shape)
            if leaf in self.leafwise.stacked:
                return Partition(shape, self.number, 0, self.tile)
            return self.params[leaf]

        return tuple(one(*each) for each in enumerate(self.leafwise.of_state))

    @functools.cached_property
    def rows_collected(self) -> tuple[Rows, ...]:
        """What a shard sends of its slices of the state to each owner."""
        types = {
            unit: jax.ShapeDtypeStruct(
                of_unit(self.collected, unit).local_shape, self.types[1][unit[0]].dtype
            )
            for unit in self.owners_of_state
            if self.collected[unit[0]].number > 1
        }
        return rows.rows_of(types, self.owners_of_state, self.number, _PLAIN)


# Rows of more bytes take too much memory at once.
_WINDOW = 1 << 26
_PLAIN = TileShape()


def bytes_of(x: Any) -> int:
    """The bytes of an array, from its type."""
    return math.prod(x.shape) * int(x.dtype.itemsize)
