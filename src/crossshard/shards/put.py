"""Puts arrays on the devices of a mesh, which may belong to several processes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def put_whole(x: Any, sharding: NamedSharding) -> jax.Array:
    """Put an array on the devices of a mesh; every process passes all of it."""
    return put(x, sharding, whole=True)


def put(x: Any, sharding: NamedSharding, *, whole: bool = False) -> jax.Array:
    """Put an array on the devices of a mesh; each process passes its own part, or the whole."""
    if jax.process_count() == 1 or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    x = x if hasattr(x, "dtype") else np.asarray(x, jnp.result_type(x))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(x), sharding, whole=whole)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    local = np.asarray(x)
    return jax.make_array_from_process_local_data(sharding, local, local.shape if whole else None)


def put_whole_unless_on(x: Any, sharding: NamedSharding) -> jax.Array:
    """``put_whole``, but what is on the mesh already may be split over it, and stays."""
    on_mesh = getattr(getattr(x, "sharding", None), "mesh", None) == sharding.mesh
    return x if on_mesh else put_whole(x, sharding)


def own_parts(sharding: NamedSharding, number: int) -> int:
    """The number of shards, of ``number``, whose rows this process passes.

    A mesh without its devices, to compile for, counts as this process's.
    """
    if jax.process_count() == 1:
        return number
    pieces: Any = sharding.devices_indices_map((number,)).items()
    own = jax.process_index()
    return len({str(piece) for device, piece in pieces if device.process_index == own})


def on_every_device(x: jax.Array) -> jax.Array:
    """An array of several processes, whole on each device; all of them must call it."""
    sharding = x.sharding
    if x.is_fully_addressable or not isinstance(sharding, NamedSharding):
        return x
    return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))


def types_on(mesh: Mesh, tree: Any, specs_of_first: Sequence[PartitionSpec]) -> Any:
    """The types of arrays on a mesh: the first leaves by their specs, others whole everywhere."""
    leaves, structure = jax.tree.flatten(tree)
    specs = [*specs_of_first, *[PartitionSpec()] * (len(leaves) - len(specs_of_first))]

    def one(x: Any, own: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, own)
        return jax.ShapeDtypeStruct(x.shape, jnp.result_type(x), sharding=sharding)

    return structure.unflatten(map(one, leaves, specs))
