"""Devices for the shards: virtual CPU devices that do not deadlock, and the mesh of a runner."""

import functools
import math
import os
import re
import warnings
from typing import Any

import jax
import numpy as np

from crossshard import _jax
from crossshard.errors import ArgumentError, ArgumentTypeError, DeadlockWarning, ShardContextError
from crossshard.shards.context import check_num_shards

AXIS = "shards"

# XLA's in-process collectives wait for all devices in one pool of threads, and deadlock when
# queued steps fill it; measured to hold with two threads a device, and these are idle ones.
_THREADS_PER_DEVICE = 4


def cpu_devices(num_devices: int) -> None:
    """Make this many virtual CPU devices, with threads enough that their collectives never lock.

    Call it before anything touches JAX's devices. On a machine whose default platform is not the
    CPU it changes nothing but the number of CPU devices.

    Raises:
      ArgumentError, ArgumentTypeError: ``num_devices`` is no int of at least 1.
      ShardContextError: JAX already runs with fewer CPU devices.

    >>> cpu_devices(1)
    """
    num_devices = check_num_shards(num_devices)
    if _jax.backend_is_running():
        have = len(jax.devices("cpu"))
        if have < num_devices:
            raise ShardContextError(
                f"{num_devices} CPU devices were asked for, but JAX already runs with {have}. Call "
                f"crossshard.cpu_devices({num_devices}) before the first JAX operation."
            )
        return
    if _threads() < _THREADS_PER_DEVICE * num_devices:
        os.environ["NPROC"] = str(_THREADS_PER_DEVICE * num_devices)
    forced = re.search(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if forced is None:
        jax.config.update("jax_num_cpu_devices", num_devices)
    elif int(forced[1]) < num_devices:
        raise ShardContextError(
            f"{num_devices} CPU devices were asked for, but XLA_FLAGS fixes their number at "
            f"{forced[1]}. Take xla_force_host_platform_device_count out of XLA_FLAGS."
        )


def _threads() -> int:
    chosen = os.environ.get("NPROC", "")
    return int(chosen) if chosen.isdigit() else os.cpu_count() or 1


@functools.lru_cache
def shard_mesh(num_shards: int) -> jax.sharding.Mesh:
    """A mesh of one axis over the first ``num_shards`` devices.

    Raises:
      ArgumentError: there are fewer devices.
    """
    devices = jax.devices()
    if len(devices) < num_shards:
        platform = devices[0].platform
        mend = (
            f"Call crossshard.cpu_devices({num_shards}) before the first JAX operation."
            if platform == "cpu"
            else f"Ask for at most {len(devices)} shards."
        )
        raise ArgumentError(
            f"{num_shards} shards need {num_shards} devices, and there are {len(devices)} "
            f"({platform}). {mend}"
        )
    mesh = jax.sharding.Mesh(np.array(devices[:num_shards]), (AXIS,))
    warn_of_deadlock(mesh)
    return mesh


def mesh_for(num_shards: int, mesh: Any) -> jax.sharding.Mesh:
    """The mesh that was given, every axis of which counts shards, or one of so many shards.

    Raises:
      ArgumentError: the mesh has another number of devices; there are fewer devices.
      ArgumentTypeError: it is no mesh.
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
            f"num_shards is {num_shards} and the mesh has {mesh.size} devices; give one of them."
        )


def torus_factors(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """The sizes into which to factor the only axis of a mesh, for collectives on a torus.

    XLA for TPUs turns a scatter over all chips into an all-reduce and a slice, and leaves scatters
    over one factor after the other as they are: seen in the compiled programs of v5e, v6e and v5p.
    """
    if mesh.devices.flat[0].platform != "tpu" or len(mesh.axis_names) > 1:
        return ()
    size = mesh.size
    second = max((d for d in range(2, math.isqrt(size) + 1) if size % d == 0), default=1)
    return (size // second, second) if second > 1 else ()


def warn_of_deadlock(mesh: jax.sharding.Mesh) -> None:
    """Warn if the mesh lies over more virtual CPU devices than the threads are safe for."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and mesh.size > 1 and _threads() < 2 * mesh.size:
        warnings.warn(
            f"{mesh.size} virtual CPU devices share {_threads()} threads: XLA's collectives can "
            f"deadlock after some hundred queued steps. Call crossshard.cpu_devices({mesh.size}) "
            f"before the first JAX operation, or set NPROC={_THREADS_PER_DEVICE * mesh.size}.",
            DeadlockWarning,
            stacklevel=4,
        )
