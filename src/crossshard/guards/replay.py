"""Replay: which arrays of two states that should be equal differ, and on which shards."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from crossshard import _jax
from crossshard._hash import to_words
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState, names_of
from crossshard.shards.axes import Shards


def copy(state: TrainState) -> TrainState:
    """A copy of a state, to donate."""
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings)(state)


def differing(
    layout: StateLayout, state: TrainState, again: TrainState
) -> dict[str, tuple[int, ...]]:
    """The names of the arrays whose bits differ, and the shards that have them."""
    specs = jax.tree.map(lambda sharding: sharding.spec, layout.shardings(state))
    run = _jax.shard_map(
        functools.partial(_of_one_device, layout),
        mesh=layout.mesh,
        in_specs=(specs, specs),
        out_specs=PartitionSpec(),
    )
    found = jax.device_get(jax.jit(run)(state, again))
    return {
        name: tuple(np.flatnonzero(on_shards).tolist())
        for name, on_shards in zip(names_of(state), found.T, strict=True)
        if on_shards.any()
    }


def _of_one_device(layout: StateLayout, state: Any, again: Any) -> jax.Array:
    """bool[shards, leaves]: what differs on any device of each shard."""
    number = layout.number_of_shards
    differ = lambda one, other: jnp.any(to_words(one) != to_words(other))
    leaves = jnp.stack(jax.tree.leaves(jax.tree.map(differ, state, again)))
    own = jnp.arange(number) == Shards(number, layout.axes, manual=True).index()
    flags = (own[:, None] & leaves).astype(jnp.int32)
    return lax.pmax(flags, layout.mesh.axis_names) > 0
