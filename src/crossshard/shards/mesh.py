"""The mesh of a step, and its shard axes."""

import functools
import logging
import math
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard import _mesh
from crossshard.errors import ArgumentError, AxisError
from crossshard.shards.context import check_axis_name, check_num_shards
from crossshard.shards.devices import check_number_of_devices, mesh_for


def mesh_and_axes(
    num_shards: int | None, mesh: Any, axis_name: Any, of_optimizer: tuple[str, ...]
) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh, and the shard axes.

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
    mesh = mesh_in_force(num_shards, named) if mesh is None else mesh
    if mesh is None:
        if num_shards is None and jax.device_count() == 1:
            _say_that_it_is_one_shard()
        count = None if num_shards is None else check_num_shards(num_shards)
        found = mesh_for(len(jax.devices()) if count is None else count, None)
    else:
        found = mesh_for(1, mesh)
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
    if num_shards is None:
        return found, axes
    count, number = check_num_shards(num_shards), number_of_shards(found, axes)
    if axes == found.axis_names:
        check_number_of_devices(count, found)
    elif count != number:
        raise ArgumentError(
            f"num_shards is {count}, but {', '.join(axes)} of the mesh {dict(found.shape)} counts "
            f"{number} shards; leave num_shards out."
        )
    return found, axes


@functools.cache
def _say_that_it_is_one_shard() -> None:
    """Log a line, once in a process: nothing is wrong, but it may not be what is meant."""
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
    """The mesh that ``jax.set_mesh`` has set, if these axes of it, or all, count so many shards.

    Beside a mesh with explicit axes JAX takes no array that lies on another one.
    """
    found = _mesh.mesh_that_is_set()
    if found is None or not set(axes) <= set(found.axis_names):
        return None
    fits = num_shards in (None, number_of_shards(found, axes or found.axis_names))
    return found if fits else None


def number_of_shards(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """The number of shards that these axes of a mesh count."""
    return math.prod(mesh.shape[axis] for axis in axes)
