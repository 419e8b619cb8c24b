"""Leaves: the arrays of a state as they are on disk, in the shapes of model and optimizer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.cut import Placement, partition_along_axis
from crossshard.step.state import NEW


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state."""

    # Where it is in the state, such as ``.params['w']``; of a typed key the dtype is ``key<…>``.
    path: str
    dtype: str
    # Its type on disk, unpadded, and its sharding before and after: split over the shards along an
    # axis that they divide, if there is one, since memory is short.
    on_disk: jax.ShapeDtypeStruct
    # That in the state.
    placement: Placement

    def of(self, dtype: str) -> "Leaf":
        """The same with the dtype that it was written with, of which it becomes this one's."""
        if dtype == self.dtype:
            return self
        return dataclasses.replace(self, on_disk=self.on_disk.update(dtype=jnp.dtype(dtype)))


def leaves_of(layout: StateLayout, state: TrainState, shards: int) -> list[Leaf]:
    """The leaves of a state, or of its types, if so many shards had written it."""
    found, placements = [], jax.tree.leaves(layout.placements(state))
    for (path, x), own in zip(jax.tree_util.tree_leaves_with_path(state), placements, strict=True):
        whole = _unpacked(own, x.shape, x.dtype)
        shape = (shards, *whole.shape[1:]) if own.per_shard else whole.shape
        if own.per_shard and shards != layout.number_of_shards:
            spec = layout.of_other_shards(own, shape).spec
        elif own.per_shard:
            spec = own.spec(layout.axes)
        else:
            spec = partition_along_axis(
                shape, layout.number_of_shards, other_axes=own.other_axes
            ).spec(layout.axes)
        sharding = NamedSharding(layout.mesh, spec)
        on_disk = jax.ShapeDtypeStruct(shape, whole.dtype, sharding=sharding)
        found.append(Leaf(jax.tree_util.keystr(path), str(x.dtype), on_disk, own))
    return found


# A loop that saves would trace it for each leaf each time.
@functools.lru_cache(maxsize=4096)
def _unpacked(placement: Placement, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    # Without its sharding, of which a mesh that the user has set would be none.
    return jax.eval_shape(functools.partial(_unpack, placement), jax.ShapeDtypeStruct(shape, dtype))


def _unpack(placement: Placement, x: Any) -> jax.Array:
    whole = placement.unpack(x)
    return jax.random.key_data(whole) if _is_key(whole) else whole


def to_disk(leaf: Leaf, x: jax.Array) -> jax.Array:
    """An array as it is on disk: itself where it can be, else a copy of it."""
    sharding, own = leaf.on_disk.sharding, leaf.placement
    # Of several processes each writes a part, also of what all of them have.
    is_split_so = jax.process_count() == 1 or x.sharding.is_equivalent_to(sharding, x.ndim)
    if own.partition is not None and own.is_split:
        is_unpacked = own.groups is None and own.partition.axis is not None
    else:
        is_unpacked = not _is_key(x)
    return x if is_split_so and is_unpacked else _copier(own, sharding)(x)


# Most leaves of a model are alike, and a compilation takes longer than they do.
@functools.lru_cache(maxsize=4096)
def _copier(placement: Placement, sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(functools.partial(_unpack, placement), out_shardings=sharding)


def from_disk(state: TrainState, arrays: list[Any]) -> TrainState:
    """An unsharded state of these arrays, or ``NEW``, with dtypes and static parts of another."""
    types, tree = jax.tree.flatten(state)
    return tree.unflatten([_like(like, x) for like, x in zip(types, arrays, strict=True)])


def _like(like: Any, x: Any) -> Any:
    if x is NEW or x.dtype == like.dtype:
        return x
    return _as_keys(like, x) if _is_key(like) else x.astype(like.dtype)


def _as_keys(like: Any, x: Any) -> Any:
    found: list[Any] = []
    # Of a type JAX does not tell the implementation of its keys directly.
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(x, impl=found[0])


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
