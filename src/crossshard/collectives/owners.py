"""Owners: takes the slices of arrays to the shards that own them, and back."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from crossshard.collectives.sums import turn
from crossshard.shards.axes import Shards
from crossshard.shards.partition import Partition
from crossshard.shards.rows import Rows, Unit, joined, take


def to_owners(rows: Rows, slices: Mapping[int, jax.Array], shards: Shards) -> jax.Array:
    """``[shards, width]``: what this shard gets: from each shard its slices of the units here.

    Args:
      rows: a row for each owner, of slices of its units.
      slices: this shard's slices of all arrays.
      shards: the shards.
    """
    given = {unit: take(slices, unit) for unit in rows.shapes}
    sent = [rows.row(owner, given).ravel() for owner in range(shards.number)]
    return turn(jnp.stack(sent), 0, 0, shards)


def at_owner(
    rows: Rows, partitions: Sequence[Partition], owner: int, received: jax.Array
) -> dict[Unit, jax.Array]:
    """The whole units of an owner, from what it got."""
    slices = [rows.units(owner, row) for row in received]
    found = {}
    for unit in rows.of_shard[owner]:
        own = of_unit(partitions, unit)
        found[unit] = own.unpack(jnp.concatenate([each[unit] for each in slices], own.axis or 0))
    return found


def by_owner(
    rows: Rows, partitions: Sequence[Partition], owner: int, whole: Mapping[Unit, jax.Array]
) -> jax.Array:
    """``[shards, width]``: what an owner sends: to each shard its slices of the units here."""
    number, split = len(rows.of_shard), {}
    for unit in rows.of_shard[owner]:
        own = of_unit(partitions, unit)
        split[unit] = jnp.split(own.pack(whole[unit]), number, own.axis or 0)
    of_shard = lambda to: {unit: each[to] for unit, each in split.items()}
    return jnp.stack([rows.row(owner, of_shard(to)).ravel() for to in range(number)])


def from_owners(rows: Rows, sent: jax.Array, shards: Shards) -> dict[int, jax.Array]:
    """This shard's slices of all arrays, from what each owner sends."""
    received = turn(sent, 0, 0, shards)
    found: dict[Unit, jax.Array] = {}
    for owner in range(shards.number):
        found |= rows.units(owner, received[owner])
    return joined(found)


def of_unit(partitions: Sequence[Partition], unit: Unit) -> Partition:
    """The partition of a unit, whose array is split along another axis than the first."""
    place, row = unit
    whole = partitions[place]
    return whole if row is None else dataclasses.replace(whole, shape=(1, *whole.shape[1:]))
