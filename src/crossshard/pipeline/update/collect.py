"""Collect: the state of a dealt update as slices of its arrays, without rows, and back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.collectives.owners import at_owner, by_owner, from_owners, to_owners
from crossshard.collectives.sums import sum_over_shards
from crossshard.pipeline.update.dealt import Dealt
from crossshard.shards.axes import Shards
from crossshard.shards.rows import Unit, joined, put, take


def collect(dealt: Dealt, state: Sequence[jax.Array], shards: Shards) -> list[jax.Array]:
    """This shard's slices of the arrays of a state, from its rows and slices."""
    found, slices, small = list(state), dealt.rows_collected, _small(dealt)

    def own(shard: int) -> tuple[list[jax.Array], list[jax.Array]]:
        units: dict[Unit, jax.Array] = {}
        for rows in dealt.state_rows:
            units |= rows.units(shard, state[rows.first])
        return (
            [by_owner(rows, dealt.collected, shard, units) for rows in slices],
            [units.get(unit, zeros) for unit, zeros in small.items()],
        )

    sent, whole = lax.switch(shards.index(), _branches(dealt, own))
    sums = [sum_over_shards(x, shards) for x in whole]
    for place, x in joined(dict(zip(small, sums, strict=True))).items():
        found[place] = x
    for rows, each in zip(slices, sent, strict=True):
        for place, x in from_owners(rows, each, shards).items():
            found[place] = x
    return found


def deal_out(dealt: Dealt, state: Sequence[jax.Array], shards: Shards) -> list[jax.Array]:
    """The inverse of ``collect``."""
    received = [
        (rows, to_owners(rows, dict(enumerate(state)), shards)) for rows in dealt.rows_collected
    ]

    def own(shard: int) -> list[jax.Array]:
        units = {unit: take(state, unit) for unit in _small(dealt)}
        for rows, each in received:
            units |= at_owner(rows, dealt.collected, shard, each)
        return [rows.row(shard, units) for rows in dealt.state_rows]

    found = list(state)
    rows_of_owner = lax.switch(shards.index(), _branches(dealt, own))
    for rows, row in zip(dealt.state_rows, rows_of_owner, strict=True):
        found = put(rows, found, row)
    return found


def _small(dealt: Dealt) -> dict[Unit, jax.Array]:
    """The units of arrays that are not split, as zeros."""
    found = {}
    for unit in sorted(dealt.owners_of_state):
        place, row = unit
        if dealt.collected[place].number == 1:
            whole = dealt.types[1][place]
            shape = whole.shape if row is None else (1, *whole.shape[1:])
            found[unit] = jnp.zeros(shape, whole.dtype)
    return found


def _branches(dealt: Dealt, function: Callable[[int], Any]) -> list[Callable[[], Any]]:
    """One for each shard, since each puts its units elsewhere."""
    return [functools.partial(function, shard) for shard in range(dealt.number)]
