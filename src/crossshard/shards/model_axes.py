"""How arrays are split over the other axes of a mesh, such as those of a model."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.errors import ArgumentError


def only(spec: Iterable[Any], axes: Iterable[str]) -> PartitionSpec:
    """The spec of these axes alone, without trailing ``None``s."""
    kept = [tuple(name for name in _names(entry) if name in axes) or None for entry in spec]
    while kept and not kept[-1]:
        kept.pop()
    return PartitionSpec(*kept)


def other_axes_of(
    tree: Any, mesh: Mesh, axes: Sequence[str], *, in_parts: bool = False
) -> tuple[PartitionSpec, ...]:
    """For each array of a pytree its spec on the other axes of the mesh.

    Args:
      tree: arrays, or types with shardings.
      mesh: the mesh of the step.
      axes: its shard axes.
      in_parts: whether arrays may be split over the shards, since parameters rest in parts.

    Returns:
      One entry per leaf; empty if no array is split.

    Raises:
      ArgumentError: an array is on another mesh, or is split over the shards.
    """
    found = tuple(
        _other_axes_of(_name(path[1:]), x, mesh, axes, in_parts)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    )
    return found if any(found) else ()


def _other_axes_of(
    name: str, x: Any, mesh: Mesh, axes: Sequence[str], in_parts: bool
) -> PartitionSpec:
    sharding = getattr(x, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return PartitionSpec()
    others = [axis for axis in mesh.axis_names if axis not in axes]
    if in_parts and not others:
        # It is moved to where it rests, from any devices.
        return PartitionSpec()
    spec = getattr(sharding, "spec", None)
    found = f"{name} is sharded over devices ({sharding if spec is None else spec})"
    if not others:
        raise ArgumentError(
            f"{found}, but in this step every shard has all parameters in full. For parameters "
            f"that rest in parts write make_train_step(..., params='sharded'). For whole ones "
            f"replicate it, with jax.device_put(params, NamedSharding(mesh, PartitionSpec())). "
            f"For a model that is split over an axis, name the shard axes: "
            f"make_train_step(..., mesh=mesh, axis_name=...)."
        )
    if not isinstance(sharding, NamedSharding) or (
        sharding.mesh.axis_names != mesh.axis_names
        or getattr(sharding.mesh, "devices", mesh.devices).tolist() != mesh.devices.tolist()
    ):
        raise ArgumentError(
            f"{found}, which is not the mesh of the step, with axes {dict(mesh.shape)}. Write "
            f"jax.device_put(params, NamedSharding(mesh, spec)), with a spec over "
            f"{', '.join(others)}."
        )
    if only(sharding.spec, axes) and not in_parts:
        raise ArgumentError(
            f"{found}, and {', '.join(axes)} is a shard axis: every shard has all parameters. The "
            f"step itself splits the optimizer state over the shards. Split parameters over "
            f"{', '.join(others)} only, or leave out of axis_name what splits them; for parameters "
            f"that rest in parts write make_train_step(..., params='sharded')."
        )
    return only(sharding.spec, others)


def other_axes_like(
    state: Any, params: Any, other_axes: Sequence[PartitionSpec]
) -> tuple[PartitionSpec, ...]:
    """For each array of an optimizer's state the entry of its parameter, if it has its shape.

    An array belongs to the parameter whose path ends its own, as in ``mu['layer']['kernel']``.
    """
    known: dict[tuple[Any, ...], PartitionSpec] = {
        (*map(str, path), x.shape): own
        for (path, x), own in zip(
            jax.tree_util.tree_leaves_with_path(params), other_axes, strict=True
        )
        if own
    }

    def of(path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
        names = [*map(str, path)]
        ends = ((*names[start:], shape) for start in range(len(names) + 1))
        return next((known[end] for end in ends if end in known), PartitionSpec())

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return tuple(of(path, x.shape) if known else PartitionSpec() for path, x in leaves)


def check_fits(params: Any, other_axes: Sequence[PartitionSpec], mesh: Mesh) -> None:
    """Raise unless parameters can be split so on a mesh.

    Raises:
      ArgumentError: the mesh has no such axis, or a dimension does not divide.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, x), own in zip(leaves, other_axes, strict=False):
        try:
            NamedSharding(mesh, own).shard_shape(x.shape)
        except ValueError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ArgumentError(
                f"{_name(path)}, of shape {x.shape}, is split as {own}, which a "
                f"mesh of {dict(mesh.shape)} cannot: {reason}. For a state of another mesh write "
                f"step.reshard(other.unshard(state))."
            ) from error


def _name(path: tuple[Any, ...]) -> str:
    return "params" + jax.tree_util.keystr(path).removesuffix(".value")


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or isinstance(entry, str):
        return () if entry is None else (entry,)
    return tuple(entry)
