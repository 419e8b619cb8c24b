"""Where am I? The shards around this line of code, found from the context and the bound axes."""

import dataclasses
import math
import warnings
from typing import Any

import jax
import numpy as np
from jax import lax

from crossshard import _jax
from crossshard.errors import AxisError, ShardContextError, ShardContextWarning
from crossshard.shards.context import get_shard_context


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards that run this line together.

    Attributes:
      number: how many there are.
      axes: the bound axes over which they lie, slowest first; empty where none is bound.
      manual: every axis is a mesh axis, of shard_map or pmap.
      has_vma: types say what varies over the axes (``check_vma=True``).
      torus_factors: sizes into which a single axis is factored, for collectives that go over one
        factor after the other.
    """

    number: int
    axes: tuple[str, ...] = ()
    manual: bool = False
    has_vma: bool = False
    torus_factors: tuple[int, ...] = ()

    def scatter_schedule(self) -> list[tuple[str, list[list[int]] | None]]:
        """What to scatter over, one after the other: an axis, and the groups on it if factored.

        After a scatter over all of them in this order, the parts lie in the order of the shards.
        """
        if not self.torus_factors:
            return [(axis, None) for axis in self.axes]
        places = np.arange(self.number).reshape(self.torus_factors)
        return [
            (self.axes[0], np.moveaxis(places, factor, -1).reshape(-1, size).tolist())
            for factor, size in enumerate(self.torus_factors)
        ]

    def index(self) -> jax.Array:
        """int32[]: which shard this is."""
        return lax.axis_index(self.axes)

    def as_varying(self, x: Any) -> Any:
        """``x`` typed as each shard's own; the same numbers."""
        return _jax.as_varying(x, self.axes) if self.has_vma else x

    def is_varying(self, x: Any) -> bool:
        """Whether the type of ``x`` says that it differs between shards."""
        return bool((_jax.varying_axes(x) | _jax.unreduced_axes(x)) & frozenset(self.axes))

    def invariant_axes(self, x: Any) -> tuple[str, ...]:
        """The axes over which the type of ``x`` says that it is equal on all shards."""
        known = _jax.varying_axes(x) | _jax.unreduced_axes(x)
        return tuple(axis for axis in self.axes if self.has_vma and axis not in known)


def current_shards(axis_name: tuple[str, ...] = (), *, warn: bool = True) -> Shards:
    """The shards here: over the named axes, else the context's, else the only bound axis.

    Where nothing is bound the number comes from the shard context; without one it is 1, with a
    ``ShardContextWarning`` if ``warn`` and nothing is traced.

    Raises:
      AxisError: a named axis is not bound while others are, or several are and none was named.
      ShardContextError: the context says another number of shards than the axes have.
    """
    bound = _jax.bound_axes()
    context = get_shard_context()
    axes = axis_name or (context.axis_name if context else ())
    if not bound:
        # Under jit arrays are global, and what is computed of them is of all shards already.
        if context is None and warn and _jax.at_top_level():
            warnings.warn(
                "CrossShardOptimizer should be used within a shard context, but none is set and no "
                "mesh axis is bound here: assuming 1 shard. Run the step with crossshard.shard, or "
                "inside jax.shard_map.",
                ShardContextWarning,
                stacklevel=2,
            )
        return Shards(context.number_of_shards if context else 1)
    if not axes and len(bound) > 1:
        raise AxisError(
            f"Several axes are bound here, {_listed(bound)}, and none was named as the one over "
            f"which the shards lie. Name it: axis_name={next(iter(bound))!r}, or all of them: "
            f"axis_name={tuple(bound)!r}."
        )
    axes = axes or tuple(bound)
    _check_bound(axes, bound)
    number = math.prod(bound[axis] for axis in axes)
    if context is not None and context.number_of_shards != number:
        raise ShardContextError(
            f"The shard context says {context.number_of_shards} shards, but the axes "
            f"{_listed({axis: bound[axis] for axis in axes})} have {number}."
        )
    return _describe(number, axes)


def shards_of_gradient(axis_name: tuple[str, ...] = ()) -> Shards:
    """The shards over which a gradient is to stay local; every bound axis if none is named.

    Nothing is reduced over them, so axes without types may be left out.

    Raises:
      AxisError: a named axis is not bound while others are.
    """
    bound = _jax.bound_axes()
    context = get_shard_context()
    axes = axis_name or (context.axis_name if context else ()) or tuple(bound)
    if not bound:
        return Shards(1)
    _check_bound(axes, bound)
    tracked = tuple(axis for axis in axes if _jax.tracks(axis))
    return Shards(math.prod(bound[axis] for axis in tracked), tracked, True, bool(tracked))


def _check_bound(axes: tuple[str, ...], bound: dict[str, int]) -> None:
    missing = [axis for axis in axes if axis not in bound]
    if missing:
        raise AxisError(
            f"The axis {missing[0]!r} is not bound here; bound are {_listed(bound)}. "
            f"Name the axis over which the shards lie: axis_name={next(iter(bound))!r}."
        )


def _describe(number: int, axes: tuple[str, ...]) -> Shards:
    mesh_axes = _jax.manual_axes()
    tracked = [_jax.tracks(axis) for axis in axes]
    if not all(tracked) and any(_jax.tracks(axis) for axis in mesh_axes):
        # JAX has no collective over vmap's axes under check_vma=True: each fails an assertion.
        loose = [axis for axis, known in zip(axes, tracked, strict=True) if not known]
        raise AxisError(
            f"The axis {loose[0]!r} is vmap's and lies inside shard_map(check_vma=True), where JAX "
            f"cannot reduce over it. Pass check_vma=False to that shard_map."
        )
    return Shards(number, axes, manual=mesh_axes.issuperset(axes), has_vma=all(tracked))


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items())
