"""Devices for the shards: virtual CPU devices that do not deadlock, and the mesh of a runner."""

import functools
import math
import os
import re
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from crossshard import _jax
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisError,
    DeadlockWarning,
    ShardContextError,
)
from crossshard.shards.context import check_num_shards

AXIS = "shards"

# XLA's in-process collectives block threads of one pool, and deadlock when queued steps fill it.
# Two threads per device sufficed in measurements; idle ones are free.
_THREADS_PER_DEVICE = 4
# The chips of the largest slice of v5e in which every chip can reach every other one.
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
    forced = forced_cpu_devices()
    if forced is None:
        jax.config.update("jax_num_cpu_devices", num_devices)
    elif forced < num_devices:
        raise ShardContextError(
            f"{num_devices} CPU devices were requested, but XLA_FLAGS fixes their number at "
            f"{forced}. Remove xla_force_host_platform_device_count from XLA_FLAGS."
        )


def forced_cpu_devices() -> int | None:
    """How many virtual CPU devices ``XLA_FLAGS`` asks for; ``None`` if it says nothing of them."""
    flags = os.environ.get("XLA_FLAGS", "")
    found = re.search(r"xla_force_host_platform_device_count=(\d+)", flags)
    return None if found is None else int(found[1])


def _threads() -> int:
    chosen = os.environ.get("NPROC", "")
    return int(chosen) if chosen.isdecimal() else os.cpu_count() or 1


@functools.lru_cache
def shard_mesh(num_shards: int) -> jax.sharding.Mesh:
    """A mesh of one axis over the first ``num_shards`` devices.

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
    mesh = jax.sharding.Mesh(np.array(devices[:num_shards]), (AXIS,))
    warn_of_deadlock(mesh)
    return mesh


def mesh_for(num_shards: int, mesh: Any) -> jax.sharding.Mesh:
    """The given mesh, all axes of which are shard axes, or a mesh of ``num_shards`` devices.

    Raises:
      ArgumentError: the mesh has another number of devices; there are fewer devices.
      ArgumentTypeError: ``mesh`` is not a mesh.
    """
    if mesh is None:
        return shard_mesh(num_shards)
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ArgumentTypeError(f"mesh must be a jax.sharding.Mesh; got {type(mesh).__name__}.")
    if num_shards != 1:
        check_number_of_devices(num_shards, mesh)
    warn_of_deadlock(mesh)
    return mesh


def check_number_of_devices(num_shards: int, mesh: jax.sharding.Mesh) -> None:
    """Raise unless the mesh has as many devices as there are to be shards.

    Raises:
      ArgumentError: it has not.
    """
    if num_shards != mesh.size:
        raise ArgumentError(
            f"num_shards is {num_shards} and the mesh has {mesh.size} devices; pass one of them."
        )


def are_of_all_processes(mesh: jax.sharding.Mesh) -> bool:
    """Whether there are several processes, and every one of them has devices of this mesh."""
    number = jax.process_count()
    return number > 1 and len({device.process_index for device in mesh.devices.flat}) == number


def between_cpus() -> bool:
    """Whether shards are on CPUs of several processes, which talk over sockets."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def torus_factors(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """Factors of a one-axis TPU mesh, for multi-stage collectives on its torus.

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


def slices_in_order(mesh: jax.sharding.Mesh) -> int:
    """The number of slices of a TPU that a mesh has, one after the other; 1 if they are mixed."""
    places = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    number = len(set(places))
    return number if places == sorted(places) and mesh.size % number == 0 else 1


def sends_beside_products(mesh: jax.sharding.Mesh) -> bool:
    """Whether neighbours send each other arrays while they compute.

    XLA for TPUs schedules a permute beside other work, except on v5e with more than 16 chips:
    "cannot be made async on platform with ICI routing limitations". Seen in the compiled programs
    of v5e:2x4 to 16x16, v6e:8x8 to 16x16 and v5p:2x2x4 to 8x8x16.
    """
    has_limits = "v5 lite" in mesh.devices.flat[0].device_kind and mesh.size > _V5E_WITHOUT_LIMITS
    return bool(torus_factors(mesh)) and slices_in_order(mesh) == 1 and not has_limits


def warn_of_deadlock(mesh: jax.sharding.Mesh) -> None:
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


def axes_in_sight(arrays: Any, number: int) -> tuple[str, ...]:
    """The axes that count ``number`` shards, where none is named.

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
