"""Leaves: the arrays of a state as they are on disk, in the shapes of model and optimizer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from crossshard.errors import ArgumentError
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.cut import Placement, partition_along_axis
from crossshard.step.state import NEW


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state.

    Attributes:
      path: where it is in the state, such as ``.params['w']``.
      dtype: the name of its dtype; of a typed key ``key<…>``.
      on_disk: its type on disk, unpadded, and its sharding before and after: split over
        the shards along an axis that they divide, if there is one, since memory is short.
      placement: that in the state.
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
    whole = _unpacked(placement, x.shape, x.dtype)
    shape, number = whole.shape, layout.number_of_shards
    if placement.per_shard:
        shape = (shards, *shape[1:])
        spec = PartitionSpec(layout.axes, *placement.other_axes)
        spec = spec if shards == number else layout.of_other_shards(placement, shape).spec
    else:
        split = partition_along_axis(shape, number, other_axes=placement.other_axes)
        spec = split.spec(layout.axes)
    sharding = NamedSharding(layout.mesh, spec)
    on_disk = jax.ShapeDtypeStruct(shape, whole.dtype, sharding=sharding)
    return Leaf(path, str(x.dtype), on_disk, placement)


# A loop that saves would trace it for each leaf each time.
@functools.lru_cache(maxsize=4096)
def _unpacked(placement: Placement, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    # Without its sharding, of which a mesh that the user has set would be none.
    lying = jax.ShapeDtypeStruct(shape, dtype)
    found: jax.ShapeDtypeStruct = jax.eval_shape(functools.partial(_unpack, placement), lying)
    return found


def _unpack(placement: Placement, x: Any) -> jax.Array:
    whole = placement.unpack(x)
    return jax.random.key_data(whole) if _is_key(whole) else whole


def check_devices(layout: StateLayout, state: TrainState) -> None:
    """Raise unless a state is on the devices of a layout.

    Raises:
      ArgumentError: it is on others, as a state of another step on another mesh does.
    """
    devices = set(layout.mesh.devices.flat)
    for x in jax.tree.leaves(state):
        if isinstance(x, jax.Array) and not x.sharding.device_set <= devices:
            both = x.sharding.device_set, devices
            names = [sorted(device.id for device in each) for each in both]
            raise ArgumentError(
                f"The state is on devices {names[0]}, and the mesh of this step has "
                f"{names[1]}. Take it there with step.reshard(other.unshard(state)), or save it "
                f"with the Checkpoints of the step that it is of."
            )


def to_disk(leaf: Leaf, x: jax.Array) -> jax.Array:
    """An array as it is on disk: itself where it can be, else a copy of it."""
    alone = jax.process_count() == 1
    # Of several processes each writes a part, also of what all of them have.
    is_split_so = alone or x.sharding.is_equivalent_to(leaf.on_disk.sharding, x.ndim)
    if not (is_split_so and _is_unpacked(leaf, x)):
        return _copier(leaf.placement, leaf.on_disk.sharding)(x)
    return x


def _is_unpacked(leaf: Leaf, x: jax.Array) -> bool:
    partition = leaf.placement.partition
    if partition is not None and leaf.placement.is_split:
        return leaf.placement.groups is None and partition.axis is not None
    return not _is_key(x)


# Most leaves of a model are alike, and a compilation takes longer than they do.
@functools.lru_cache(maxsize=4096)
def _copier(placement: Placement, sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(functools.partial(_unpack, placement), out_shardings=sharding)


def from_disk(state: TrainState, arrays: list[Any]) -> TrainState:
    """An unsharded state of these arrays, or ``NEW``, with dtypes and static parts of another."""
    types, tree = jax.tree.flatten(state)
    return tree.unflatten([_like(like, x) for like, x in zip(types, arrays, strict=True)])


def _like(like: Any, x: Any) -> Any:
    if x is NEW:
        return x
    if _is_key(like):
        return jax.random.wrap_key_data(x, impl=_impl_of(like))
    return x if x.dtype == like.dtype else x.astype(like.dtype)


def _impl_of(key: Any) -> Any:
    """The implementation of a key, or of its type, of which JAX does not tell it directly."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
