"""Devices for the shards: virtual CPU ones that do not deadlock, and the meshes made of them."""

import functools
import logging
import math
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax, _mesh
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisError,
    DeadlockWarning,
    ShardContextError,
)
from crossshard.shards.axes import GroupAssignment, Shards, check_axis_name, check_num_shards
from crossshard.shards.random_streams import is_key

AXIS = "shards"

# XLA's in-process collectives block threads of one pool, and deadlock when queued steps fill it.
# Two threads per device sufficed in measurements; idle ones are free.
_THREADS_PER_DEVICE = 4
# The number of chips of the largest v5e slice in which every chip can reach every other one.
_V5E_WITHOUT_LIMITS = 16


def cpu_devices(num_devices: int) -> None:
    """Create virtual CPU devices, with enough threads for their collectives.

    Call it before the first JAX operation. If JAX finds a GPU or TPU, that stays the default.

    Raises:
      ArgumentError, ArgumentTypeError: ``num_devices`` is not an int of at least 1.
      ShardContextError: JAX already runs with fewer CPU devices.

    >>> cpu_devices(1)
    """
    num_devices = check_num_shards(num_devices)
    if _jax.backend_is_running():
        have = len(jax.devices("cpu"))
        if have < num_devices:
            raise ShardContextError(
                f"{num_devices} CPU devices were requested, but JAX already runs with {have}. Call "
                f"crossshard.cpu_devices({num_devices}) before the first JAX operation."
            )
        return
    if _threads() < _THREADS_PER_DEVICE * num_devices:
        os.environ["NPROC"] = str(_THREADS_PER_DEVICE * num_devices)
    flags = os.environ.get("XLA_FLAGS", "")
    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", flags)
    if forced is None:
        jax.config.update("jax_num_cpu_devices", num_devices)
    elif int(forced[1]) < num_devices:
        raise ShardContextError(
            f"{num_devices} CPU devices were requested, but XLA_FLAGS fixes their number at "
            f"{forced[1]}. Remove xla_force_host_platform_device_count from XLA_FLAGS."
        )


def _threads() -> int:
    chosen = os.environ.get("NPROC", "")
    return int(chosen) if chosen.isdecimal() else os.cpu_count() or 1


@functools.lru_cache
def shard_mesh(num_shards: int) -> Mesh:
    """Return a mesh of one axis over the first ``num_shards`` devices.

    Raises:
      ArgumentError: there are fewer devices.
    """
    devices = jax.devices()
    if len(devices) < num_shards:
        platform = devices[0].platform
        hint = (
            f"Call crossshard.cpu_devices({num_shards}) before the first JAX operation."
            if platform == "cpu"
            else f"Use at most {len(devices)} shards."
        )
        raise ArgumentError(
            f"{num_shards} shards need {num_shards} devices, and there are {len(devices)} "
            f"({platform}). {hint}"
        )
    mesh = Mesh(np.array(devices[:num_shards]), (AXIS,))
    warn_of_deadlock(mesh)
    return mesh


def mesh_for(num_shards: int, mesh: Any) -> Mesh:
    """Return the given mesh, whose axes are all shard axes, or one of ``num_shards`` devices.

    Raises:
      ArgumentError: the mesh has another number of devices; there are fewer devices.
      ArgumentTypeError: ``mesh`` is not a mesh.
    """
    if mesh is None:
        return shard_mesh(num_shards)
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError(f"mesh must be a jax.sharding.Mesh; got {type(mesh).__name__}.")
    if num_shards != 1:
        check_number_of_devices(num_shards, mesh)
    warn_of_deadlock(mesh)
    return mesh


def check_number_of_devices(num_shards: int, mesh: Mesh) -> None:
    """Raise unless the mesh has ``num_shards`` devices."""
    if num_shards != mesh.size:
        raise ArgumentError(
            f"num_shards is {num_shards} and the mesh has {mesh.size} devices; pass one of them."
        )


def are_of_all_processes(mesh: Mesh) -> bool:
    """Return whether there are several processes, all of which have devices of this mesh."""
    number = jax.process_count()
    return number > 1 and len({device.process_index for device in mesh.devices.flat}) == number


def between_cpus() -> bool:
    """Return whether shards are on CPUs of several processes, which talk over sockets."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def torus_factors(mesh: Mesh) -> tuple[int, ...]:
    """Return factors of a one-axis TPU mesh, for multi-stage collectives on its torus.

    XLA for TPUs compiles a reduce-scatter over all chips to an all-reduce and a slice, but keeps
    reduce-scatters over the factors: seen in the compiled programs of v5e, v6e and v5p.
    """
    if mesh.devices.flat[0].platform != "tpu" or len(mesh.axis_names) > 1:
        return ()
    slices = slices_in_order(mesh)
    size = mesh.size // slices
    second = max((d for d in range(2, math.isqrt(size) + 1) if size % d == 0), default=1)
    within = (size // second, second) if second > 1 else (size,) * (slices > 1)
    return (slices, *within) if slices > 1 else within


def slices_in_order(mesh: Mesh) -> int:
    """Return how many TPU slices a mesh has, one after the other; 1 if they are mixed."""
    places = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    number = len(set(places))
    return number if places == sorted(places) and mesh.size % number == 0 else 1


def sends_beside_products(mesh: Mesh) -> bool:
    """Return whether neighbours can send each other arrays while they compute.

    XLA for TPUs schedules a permute beside other work, except on v5e with more than 16 chips:
    "cannot be made async on platform with ICI routing limitations". Seen in the compiled programs
    of v5e:2x4 to 16x16, v6e:8x8 to 16x16 and v5p:2x2x4 to 8x8x16.
    """
    has_limits = "v5 lite" in mesh.devices.flat[0].device_kind and mesh.size > _V5E_WITHOUT_LIMITS
    return bool(torus_factors(mesh)) and slices_in_order(mesh) == 1 and not has_limits


def warn_of_deadlock(mesh: Mesh) -> None:
    """Warn if a mesh of virtual CPU devices has too few threads."""
    if mesh.devices.flat[0].platform != "cpu":
        return
    # Each process has threads of its own.
    own = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    if own > 1 and _threads() < 2 * own:
        warnings.warn(
            f"{own} virtual CPU devices share {_threads()} threads: XLA's collectives can "
            f"deadlock after some hundred queued steps. Call crossshard.cpu_devices({own}) "
            f"before the first JAX operation, or set NPROC={_THREADS_PER_DEVICE * own}.",
            DeadlockWarning,
            stacklevel=4,
        )


def infer_axes(arrays: Any, number: int) -> tuple[str, ...]:
    """Return the axes that count ``number`` shards, where none is named.

    ``"shards"``, unless the arrays are on a mesh without it, or ``jax.set_mesh`` has set one.

    Raises:
      AxisError: all axes of that mesh together count another number.
    """
    given = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arrays)]
    meshes = [each.mesh for each in given if isinstance(each, NamedSharding)]
    mesh: Any = meshes[0] if meshes else jax.sharding.get_abstract_mesh()
    if mesh.empty or AXIS in mesh.axis_names:
        return (AXIS,)
    if mesh.size != number:
        raise AxisError(
            f"Nothing says which axes of the mesh {dict(mesh.shape)} count the {number} shards. "
            f"Pass axis_name=, to the call or once to CrossShardOptimizer."
        )
    return tuple(mesh.axis_names)


# The mesh of a step.


def mesh_and_axes(
    num_shards: int | None, mesh: Any, axis_name: Any, of_optimizer: tuple[str, ...]
) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh, and the shard axes.

    Args:
      num_shards: their number; any if ``None``.
      mesh: the mesh; if ``None``, the one that ``jax.set_mesh`` has set, if it counts as many
        shards, or else one of ``num_shards`` devices, or of all.
      axis_name: the axes; those of the optimizer, else all of the mesh, if ``None``.
      of_optimizer: the axes that the optimizer reduces over; empty if it names none.

    Raises:
      ArgumentError: another number of shards or devices; the optimizer names other axes.
      ArgumentTypeError: not a mesh, not a number, or not names.
      AxisError: the mesh has no such axis.
    """
    named = check_axis_name(axis_name) or of_optimizer
    count = None if num_shards is None else check_num_shards(num_shards)
    mesh = mesh_in_force(count, named) if mesh is None else mesh
    if mesh is None and count is None and jax.device_count() == 1:
        _log_one_shard()
    found = mesh_for(count or jax.device_count() if mesh is None else 1, mesh)
    missing = [axis for axis in named if axis not in found.axis_names]
    if missing:
        without = " Pass mesh=, the mesh that has it." if mesh is None else ""
        raise AxisError(
            f"axis_name names {missing[0]!r}, which is not an axis of the mesh, "
            f"{dict(found.shape)}. Name those of its shard axes.{without}"
        )
    if named and of_optimizer and set(named) != set(of_optimizer):
        raise ArgumentError(
            f"The optimizer reduces over the axes {list(of_optimizer)}, but axis_name says that "
            f"{list(named)} are its shard axes. Name the axes in one of the two places."
        )
    axes = named if 0 < len(named) < len(found.axis_names) else found.axis_names
    number = number_of_shards(found, axes)
    if count is not None and axes == found.axis_names:
        check_number_of_devices(count, found)
    elif count not in (None, number):
        raise ArgumentError(
            f"num_shards is {count}, but {', '.join(axes)} of the mesh {dict(found.shape)} counts "
            f"{number} shards; leave num_shards out."
        )
    return found, axes


@functools.cache
def _log_one_shard() -> None:
    """Log a line, once in a process: one shard is not wrong, but may not be intended."""
    (device,) = jax.devices()
    on_cpu = (
        "crossshard.cpu_devices(8) first, JAX for your GPUs or TPUs (see crossshard doctor), or "
    )
    logging.getLogger("crossshard").warning(
        f"crossshard trains on one shard: JAX found one device ({device.device_kind}). For more: "
        f"{on_cpu if device.platform == 'cpu' else ''}crossshard.distributed.initialize() in "
        f"several processes; num_shards=1 if one is meant."
    )


def mesh_in_force(num_shards: Any, axes: tuple[str, ...] = ()) -> Mesh | None:
    """Return the mesh that ``jax.set_mesh`` has set, if these axes, or all, count so many shards.

    Beside a mesh with explicit axes JAX takes no array that lies on another one.
    """
    found = _mesh.mesh_that_is_set()
    if found is None or not set(axes) <= set(found.axis_names):
        return None
    fits = num_shards in (None, number_of_shards(found, axes or found.axis_names))
    return found if fits else None


def shards_on(mesh: Mesh, axes: tuple[str, ...], groups: GroupAssignment | None) -> Shards:
    """Return the shards on these axes of a mesh, inside ``shard_map``."""
    return Shards(
        number_of_shards(mesh, axes),
        axes,
        manual=True,
        torus_factors=torus_factors(mesh),
        other_axes=tuple(axis for axis in mesh.axis_names if axis not in axes),
        platform=mesh.devices.flat[0].platform,
        in_rings=sends_beside_products(mesh),
        slices=slices_in_order(mesh),
        groups=groups,
    )


def number_of_shards(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Return the number of shards that these axes of a mesh count."""
    return math.prod(mesh.shape[axis] for axis in axes)


# ---- Arrays on the devices of a mesh.


def put_whole(x: Any, sharding: NamedSharding) -> jax.Array:
    """Put an array on the devices of a mesh; every process passes all of it."""
    return put(x, sharding, whole=True)


def put(x: Any, sharding: NamedSharding, *, whole: bool = False) -> jax.Array:
    """Put an array on the devices of a mesh; each process passes its own rows, or the whole."""
    if jax.process_count() == 1 or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    x = x if hasattr(x, "dtype") else np.asarray(x, jnp.result_type(x))
    if is_key(x):
        data = put(jax.random.key_data(x), sharding, whole=whole)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    local = np.asarray(x)
    return jax.make_array_from_process_local_data(sharding, local, local.shape if whole else None)


def put_whole_unless_on(x: Any, sharding: NamedSharding) -> jax.Array:
    """Put an array on the devices of a mesh; one that is there already stays, even if split."""
    on_mesh = getattr(getattr(x, "sharding", None), "mesh", None) == sharding.mesh
    return x if on_mesh else put_whole(x, sharding)


def own_shards(sharding: NamedSharding, number: int) -> Sequence[int]:
    """Return the shards, of ``number``, whose rows this process passes, in order.

    A mesh of absent devices, for which a step is only compiled, counts as this process's.
    """
    if jax.process_count() == 1:
        return range(number)
    pieces: Any = sharding.devices_indices_map((number,)).items()
    own = jax.process_index()
    # A mesh of one shard has no piece that begins anywhere.
    return sorted({piece[0].start or 0 for device, piece in pieces if device.process_index == own})


def on_every_device(x: jax.Array) -> jax.Array:
    """Replicate an array of several processes on each device; all of them must call it."""
    sharding = x.sharding
    if x.is_fully_addressable or not isinstance(sharding, NamedSharding):
        return x
    return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))


def types_on(mesh: Mesh, tree: Any, specs_of_first: Sequence[PartitionSpec]) -> Any:
    """Return the types of arrays on a mesh: the first by their specs, the others replicated."""
    leaves, structure = jax.tree.flatten(tree)
    specs = [*specs_of_first, *[PartitionSpec()] * (len(leaves) - len(specs_of_first))]

    def one(x: Any, own: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, own)
        return jax.ShapeDtypeStruct(x.shape, jnp.result_type(x), sharding=sharding)

    return structure.unflatten(map(one, leaves, specs))
