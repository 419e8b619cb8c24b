"""The mesh axes along which a collective sends, and whether it stays within a shard."""

import math
from collections.abc import Hashable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from crossshard.tools.inspection.replica_groups import Groups

# The names of the axes of a program's mesh with their sizes, in the order of its devices.
Axes = tuple[tuple[str, int], ...]


def mesh_axes(compiled: jax.stages.Compiled) -> Axes:
    """The axes of the mesh that a program's inputs are on; empty if unknown.

    The program numbers the devices of one slice of a TPU after those of the other, and a mesh in
    another order is as good as unknown.

    >>> import jax.numpy as jnp
    >>> mesh_axes(jax.jit(lambda w: 2 * w).lower(jnp.zeros(3)).compile())
    ()
    """
    shardings = jax.tree.leaves(compiled.input_shardings)
    meshes: list[Mesh] = [
        each.mesh
        for each in shardings
        if isinstance(each, NamedSharding) and isinstance(each.mesh, Mesh)
    ]
    found = max(meshes, key=lambda mesh: len(mesh.axis_names), default=None)
    if found is None:
        return ()
    slices = [getattr(device, "slice_index", 0) for device in found.devices.flat]
    return tuple(found.shape.items()) if slices == sorted(slices) else ()


def axes_of(groups: Groups, axes: Axes) -> tuple[str, ...]:
    """The axes along which the devices of a group differ.

    >>> axes_of(((0, 1), (2, 3)), (("data", 2), ("model", 2)))
    ('model',)
    """
    sizes = [size for _, size in axes]
    if not axes or max((device for group in groups for device in group), default=0) >= math.prod(
        sizes
    ):
        return ()
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.array(np.unravel_index(list(group), sizes))
        differ |= (places != places[:, :1]).any(axis=1)
    return tuple(name for (name, _), along in zip(axes, differ, strict=True) if along)


def within_shard(groups: Groups, data: Sequence[Hashable]) -> bool:
    """Whether a collective only connects devices with the same data, over which layers are split.

    >>> within_shard(((0, 1), (2, 3)), data=["first", "first", "second", "second"])
    True
    """
    return bool(data) and all(len({data[device] for device in group}) == 1 for group in groups)
