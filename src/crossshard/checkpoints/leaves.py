"""Leaves: the arrays of a state as they are on disk, in the shapes of model and optimizer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from crossshard.shards.partition import partition_along_axis
from crossshard.shards.placement import Placement
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.options import NEW
from crossshard.train_step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state.

    Attributes:
      path: where it is in the state, such as ``.params['w']``.
      dtype: the name of its dtype; of a typed key ``key<…>``.
      on_disk: its type on disk, unpadded, and how it lies on the mesh before and after: split over
        the shards along an axis that they divide, if there is one, since memory is short.
      placement: how it lies in the state.
    """

    path: str
    dtype: str
    on_disk: jax.ShapeDtypeStruct
    placement: Placement


def leaves_of(layout: StateLayout, state: TrainState, shards: int) -> list[Leaf]:
    """The leaves of a state, or of its types, if so many shards had written it."""
    placements = jax.tree.leaves(layout.placements(state))
    return [
        _leaf(layout, jax.tree_util.keystr(path), x, placement, shards)
        for (path, x), placement in zip(
            jax.tree_util.tree_leaves_with_path(state), placements, strict=True
        )
    ]


def _leaf(layout: StateLayout, path: str, x: Any, placement: Placement, shards: int) -> Leaf:
    # Without its sharding, of which a mesh that the user has set would be none.
    lying = jax.ShapeDtypeStruct(x.shape, x.dtype)
    whole = jax.eval_shape(functools.partial(_unpack, placement), lying)
    shape, number = whole.shape, layout.number_of_shards
    if placement.per_shard:
        shape = (shards, *shape[1:])
        spec = PartitionSpec(layout.axes, *placement.other_axes)
        spec = spec if shards == number else PartitionSpec()
    else:
        split = partition_along_axis(shape, number, other_axes=placement.other_axes)
        spec = split.spec(layout.axes)
    sharding = NamedSharding(layout.mesh, spec)
    on_disk = jax.ShapeDtypeStruct(shape, whole.dtype, sharding=sharding)
    return Leaf(path, str(x.dtype), on_disk, placement)


def _unpack(placement: Placement, x: Any) -> jax.Array:
    whole = placement.unpack(x)
    return jax.random.key_data(whole) if _is_key(whole) else whole


def to_disk(leaf: Leaf, x: jax.Array) -> jax.Array:
    """A copy of an array as it is on disk: the next step donates the state."""
    return _copier(leaf.placement, leaf.on_disk.sharding)(x)


# Most leaves of a model are alike, and a compilation takes longer than they do.
@functools.lru_cache(maxsize=4096)
def _copier(placement: Placement, sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda x: jnp.copy(_unpack(placement, x)), out_shardings=sharding)


def from_disk(state: TrainState, arrays: list[Any]) -> TrainState:
    """An unsharded state of these arrays, or ``NEW``, with dtypes and static parts of another."""
    like, tree = jax.tree.flatten(state)
    return tree.unflatten([_like(own, x) for own, x in zip(like, arrays, strict=True)])


def _like(own: Any, x: Any) -> Any:
    if x is NEW:
        return x
    if _is_key(own):
        return jax.random.wrap_key_data(x, impl=_impl_of(own))
    return x if x.dtype == own.dtype else x.astype(own.dtype)


def _impl_of(key: Any) -> Any:
    """The implementation of a key, or of its type, of which JAX does not tell it directly."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
