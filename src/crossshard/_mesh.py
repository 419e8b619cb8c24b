"""The mesh that ``jax.set_mesh`` has set, and meshes whose axes are explicit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from crossshard import _jax


def another_mesh_is_set(mesh: Mesh) -> bool:
    """Return whether ``jax.set_mesh`` has set another mesh, which shard_map would reject."""
    current = jax.sharding.get_abstract_mesh()
    return not current.empty and current != mesh.abstract_mesh


def in_place_of_the_users_mesh(mesh: Mesh) -> AbstractContextManager[object]:
    """Set ``mesh`` if ``jax.set_mesh`` has set another."""
    if not another_mesh_is_set(mesh):
        return nullcontext()
    if _jax.at_top_level():
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def without_mesh() -> AbstractContextManager[object]:
    """Run or trace as if no mesh were set; a function so traced can run under any mesh."""
    return in_place_of_the_users_mesh(Mesh(np.empty((), object), ()))


def mesh_that_is_set() -> Mesh | None:
    """Return the mesh that ``jax.set_mesh`` has set; ``None`` without one, or while tracing."""
    if jax.sharding.get_abstract_mesh().empty or not _jax.at_top_level():
        return None
    found = jax.sharding.get_mesh()
    return None if found.empty else found


def with_automatic_axes(mesh: Mesh) -> Mesh:
    """Return a mesh of the same devices and names, all axes of which are ``AxisType.Auto``."""
    if not has_explicit_axes(mesh):
        return mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def has_explicit_axes(mesh: Any) -> bool:
    """Return whether a mesh has an axis over which types say how arrays are sharded."""
    return any(kind is not AxisType.Auto for kind in mesh.axis_types)


class OnAutomaticAxes:
    """A compiled function of arrays on explicit axes, which sees them on automatic ones.

    The arrays are moved from one mesh to the other outside of what JAX compiles, without a copy;
    that takes some microseconds for each. ``under_automatic_axes`` does it inside, which JAX
    refuses of a program that needs to know its devices: one with a callback to Python, or with an
    operation of ``custom_partitioning``, such as cuDNN's attention.
    """

    def __init__(self, compiled: Any, mesh: Mesh):
        self._compiled = compiled
        self._mesh = mesh

    def _run(self, call: Callable[..., Any], args: Any) -> Any:
        with in_place_of_the_users_mesh(with_automatic_axes(self._mesh)):
            return call(*jax.tree.map(lambda x: on_mesh(x, None), args))

    def __call__(self, *args: Any) -> Any:
        """Call the function, and return its results on the explicit axes again."""
        found = self._run(self._compiled, args)
        return jax.tree.map(lambda x: on_mesh(x, self._mesh), found)

    def lower(self, *args: Any) -> Any:
        """Lower the function, for arrays on automatic axes."""
        return self._run(self._compiled.lower, args)

    def trace(self, *args: Any) -> Any:
        """Trace the function, for arrays on automatic axes."""
        return self._run(self._compiled.trace, args)


def of_rows(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to arrays ``[shards, …]``, of which JAX types no row on explicit axes."""
    meshes = (getattr(leaf.sharding, "mesh", None) for leaf in jax.tree.leaves(x))
    own = next((mesh for mesh in meshes if mesh is not None and has_explicit_axes(mesh)), None)
    return function(x) if own is None else OnAutomaticAxes(function, own)(x)


def under_automatic_axes(
    function: Callable[..., Any], mesh: Mesh, specs: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a function so that it runs as if the axes of a mesh were ``AxisType.Auto``.

    Its arguments may lie on the mesh. ``specs`` takes its results, and returns their specs.
    """
    if not has_explicit_axes(mesh):
        return function
    inside = with_automatic_axes(mesh)
    cast = lambda x: jax.sharding.reshard(x, PartitionSpec(*[None] * jnp.ndim(x)))

    def typed(x: Any, spec: PartitionSpec) -> Any:
        # Types do not show the other axes, which are Auto.
        x = lax.with_sharding_constraint(x, NamedSharding(inside, spec))
        return jax.sharding.reshard(x, NamedSharding(mesh, explicit_part(spec, mesh)))

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(inside.abstract_mesh):
            found = function(*jax.tree.map(cast, args))
            return jax.tree.map(typed, found, specs(found))

    return run


def explicit_part(spec: PartitionSpec, mesh: Mesh) -> Any:
    """Return the part of a spec that types show: without axes that are ``AxisType.Auto``."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    is_typed = lambda name: kinds.get(name) is AxisType.Explicit
    return PartitionSpec(*(tuple(filter(is_typed, each)) or None for each in names))


def on_mesh(x: Any, mesh: Mesh | None) -> Any:
    """Move an array, or its type, to a mesh that differs from its own only in its axis types.

    Nothing is copied. ``None`` stands for the array's own mesh with ``AxisType.Auto`` axes. An
    array that is traced, or on no such mesh, is returned unchanged.
    """
    own = getattr(x, "sharding", None)
    if isinstance(x, jax.core.Tracer) or not isinstance(own, NamedSharding):
        return x
    if not isinstance(own.mesh, Mesh):
        return x
    mesh = with_automatic_axes(own.mesh) if mesh is None else mesh
    same_but_for_types = own.mesh.axis_names == mesh.axis_names and np.array_equal(
        own.mesh.devices, mesh.devices
    )
    if own.mesh == mesh or not same_but_for_types:
        return x
    # Types list all dimensions, and jit compares specs as they are written.
    spec = (*own.spec, *[None] * (x.ndim - len(own.spec))) if has_explicit_axes(mesh) else own.spec
    spec = PartitionSpec(*spec)
    sharding = NamedSharding(mesh, spec, memory_kind=own.memory_kind)
    if not isinstance(x, jax.Array):
        return x.update(sharding=sharding)
    pieces = [piece.data for piece in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces, dtype=x.dtype)


def constrained(x: Any, sharding: NamedSharding) -> Any:
    """Constrain a sharding, also on explicit axes, which ``lax`` only checks and does not move."""
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and has_explicit_axes(mesh):
        typed = NamedSharding(mesh, explicit_part(sharding.spec, mesh))
        return jax.sharding.reshard(x, typed)
    return lax.with_sharding_constraint(x, sharding)
