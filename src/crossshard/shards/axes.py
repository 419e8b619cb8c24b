"""The current shards, found from the shard context and the bound mesh axes, and their groups."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from crossshard import _jax
from crossshard.errors import AxisError, ShardContextError, ShardContextWarning
from crossshard.shards.context import get_shard_context
from crossshard.shards.groups import GroupAssignment


@dataclasses.dataclass(frozen=True)
class Shards:
    """The current shards, and which of them reduce together.

    Attributes:
      number: the number of all shards.
      axes: their bound axes, major first; empty if none is bound.
      manual: whether every axis is a mesh axis, of shard_map or pmap.
      has_vma: whether types track what varies over the axes (``check_vma=True``).
      torus_factors: factors of a single axis, for multi-stage collectives.
      other_axes: the other axes of their mesh, over which XLA splits the work of each shard.
      platform: that of their devices, as ``"cpu"``; empty if it is not known before XLA compiles.
      in_rings: whether slices go round beside the products that they are for.
      slices: the number of slices of a TPU, with a slower network between them, that follow each
        other along a single axis.
      groups: the groups that reduce independently; ``None`` for all shards.
    """

    number: int
    axes: tuple[str, ...] = ()
    manual: bool = False
    has_vma: bool = False
    torus_factors: tuple[int, ...] = ()
    other_axes: tuple[str, ...] = ()
    platform: str = ""
    in_rings: bool = False
    slices: int = 1
    groups: GroupAssignment | None = None

    @property
    def all(self) -> Self:
        """The same shards, all of which reduce together."""
        return self if self.groups is None else dataclasses.replace(self, groups=None)

    @property
    def across(self) -> Self:
        """The same shards, of which those with one position in their groups reduce together."""
        groups = self.groups
        if groups is None or groups.size == 1:
            return self.all
        columns = GroupAssignment(tuple(map(tuple, groups.members.T.tolist())))
        return dataclasses.replace(self, groups=columns)

    @property
    def size(self) -> int:
        """The number of shards that reduce together."""
        return self.number if self.groups is None else self.groups.size

    @property
    def is_grouped(self) -> bool:
        """Whether there are several groups, so that a reduction is not the same on every shard."""
        return self.groups is not None and len(self.groups.groups) > 1

    @property
    def members(self) -> list[list[int]] | None:
        """The shards of each group, as JAX takes them; ``None`` for all shards."""
        return None if self.groups is None else self.groups.members.tolist()

    @property
    def is_inner_first(self) -> bool:
        """Whether a sum goes inside first, and a part of it over the slower network between.

        A gather goes the other way.
        """
        return self.groups is None and (len(self.axes) > 1 or self.slices > 1)

    def by_platform(self, x: Any, cpu: Callable[[Any], Any], default: Callable[[Any], Any]) -> Any:
        """``cpu(x)`` on CPUs, and else ``default(x)``."""
        if self.platform:
            # Under jax.checkpoint, lax.platform_dependent would choose at run time.
            return cpu(x) if self.platform == "cpu" else default(x)
        return lax.platform_dependent(x, cpu=cpu, default=default)

    def scatter_schedule(self) -> list[tuple[Any, list[list[int]] | None]]:
        """The stages of a reduce-scatter: an axis, and its groups if it is factored.

        Scattering in this order leaves the slices in the order of the shards. Groups have one
        stage, over all axes.
        """
        if self.groups is not None:
            return [(self.axes, self.members)]
        if not self.torus_factors:
            return [(axis, None) for axis in self.axes]
        indices = np.arange(self.number).reshape(self.torus_factors)
        return [
            (self.axes[0], np.moveaxis(indices, factor, -1).reshape(-1, size).tolist())
            for factor, size in enumerate(self.torus_factors)
        ]

    def index(self) -> jax.Array:
        """int32[]: the index of this shard."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def position(self) -> jax.Array:
        """int32[]: the index of this shard in its group: which slice of an array is its own."""
        index = self.index()
        return index if self.groups is None else jnp.asarray(self.groups.position_of)[index]

    def as_varying(self, x: Any) -> Any:
        """``x`` cast to varying."""
        return _jax.as_varying(x, self.axes) if self.has_vma else x

    def is_varying(self, x: Any) -> bool:
        """Whether ``x`` is varying or unreduced, from its type."""
        return bool((_jax.varying_axes(x) | _jax.unreduced_axes(x)) & frozenset(self.axes))

    def invariant_axes(self, x: Any) -> tuple[str, ...]:
        """The axes over which ``x`` is invariant, from its type."""
        known = _jax.varying_axes(x) | _jax.unreduced_axes(x)
        return tuple(axis for axis in self.axes if self.has_vma and axis not in known)


def current_shards(
    axis_name: tuple[str, ...] = (),
    groups: GroupAssignment | None = None,
    *,
    warn: bool = True,
    what: str = "CrossShardOptimizer",
) -> Shards:
    """The current shards: over the named axes, else the context's, else the only bound axis.

    Without bound axes, the number comes from the shard context; without that it is 1, with a
    ``ShardContextWarning`` of ``what`` if ``warn`` and nothing is traced.

    Raises:
      AxisError: a named axis is not bound but others are, or several are bound and none is named.
      GroupAssignmentError: the groups are not a partition of the shards.
      ShardContextError: the context and the axes have different numbers of shards.
    """
    shards = _current_shards(axis_name, warn, what)
    if groups is not None:
        groups.check_covers(shards.number)
    return dataclasses.replace(shards, groups=groups)


def _current_shards(axis_name: tuple[str, ...], warn: bool, what: str) -> Shards:
    bound = _jax.bound_axes()
    context = get_shard_context()
    axes = axis_name or (context.axis_name if context else ())
    if not bound:
        # Under jit arrays are global, and what is computed of them is of all shards already.
        if context is None and warn and _jax.at_top_level():
            warnings.warn(
                f"{what} should be used within a shard context, but none is set and no mesh axis "
                f"is bound here: assuming 1 shard. Run the step with crossshard.shard, or inside "
                f"jax.shard_map.",
                ShardContextWarning,
                stacklevel=4,
            )
        return Shards(context.number_of_shards if context else 1)
    if not axes and len(bound) > 1:
        raise AxisError(
            f"Several axes are bound here, {_listed(bound)}, and none is named as the axis of the "
            f"shards. Name the axis over which the batch is split, or a tuple of axes: "
            f"axis_name={next(iter(bound))!r}. Leave out axes over which parameters are split."
        )
    axes = axes or tuple(bound)
    _check_bound(axes, bound)
    number = math.prod(bound[axis] for axis in axes)
    if context is not None and context.number_of_shards != number:
        raise ShardContextError(
            f"The shard context has {context.number_of_shards} shards, but the axes "
            f"{_listed({axis: bound[axis] for axis in axes})} have {number}."
        )
    return _describe(number, axes)


def shards_of_gradient(axis_name: tuple[str, ...] = (), params: Iterable[Any] = ()) -> Shards:
    """The shards over which a gradient stays local.

    Their axes are the named ones, else the context's, else the only bound axis, else every bound
    axis over which no parameter varies. Axes without types are left out, since autodiff does not
    reduce over them.

    Raises:
      AxisError: a named axis is not bound but others are.
    """
    bound = _jax.bound_axes()
    context = get_shard_context()
    axes = axis_name or (context.axis_name if context else ())
    if not axes:
        # An axis over which parameters are split is model parallel and does not split the batch.
        several = len(bound) > 1
        split = frozenset[str]().union(*map(_jax.varying_axes, params if several else ()))
        axes = tuple(axis for axis in bound if axis not in split)
    if not bound:
        return Shards(1)
    _check_bound(axes, bound)
    tracked = tuple(axis for axis in axes if _jax.has_vma(axis))
    return Shards(math.prod(bound[axis] for axis in tracked), tracked, True, bool(tracked))


@dataclasses.dataclass(frozen=True)
class UntypedAxes:
    """The bound axes without types.

    Attributes:
      named: the known shard axes; empty if none is named.
      bound: all bound axes.
      further: of the others, those without types, with their sizes.
    """

    named: tuple[str, ...]
    bound: tuple[str, ...]
    further: dict[str, int]


def untyped_axes(axis_name: tuple[str, ...] = ()) -> UntypedAxes:
    """The bound axes without types that may count no shards."""
    bound = _jax.bound_axes()
    context = get_shard_context()
    # A single axis is known to.
    only = tuple(bound) if len(bound) == 1 else ()
    named = axis_name or (context.axis_name if context else ()) or only
    further = {
        axis: size
        for axis, size in bound.items()
        if axis not in named and size > 1 and not _jax.has_vma(axis)
    }
    return UntypedAxes(named, tuple(bound), further)


def check_one_way(loss: Any, shards: Shards, axis_name: tuple[str, ...]) -> None:
    """Raise if the axes of the batch are ambiguous.

    Raises:
      AxisError: none is named, and the loss is already reduced over some of several axes.
    """
    reduced = shards.invariant_axes(loss)
    rest = tuple(axis for axis in shards.axes if axis not in reduced)
    if not reduced or not rest or axis_name or get_shard_context():
        return
    name = rest if len(rest) > 1 else rest[0]
    raise AxisError(
        f"Several axes are bound here, {_listed(_jax.bound_axes())}, none is named as the axis of "
        f"the shards, and the loss is already reduced over {', '.join(map(repr, reduced))}. Name "
        f"the axis, or a tuple of axes, that the optimizer reduces over: axis_name={name!r}."
    )


def check_no_further(loss: Any, shards: Shards, params: Iterable[Any]) -> None:
    """Raise if a loss varies over an axis that is not a shard axis, so that autodiff would sum it.

    Over an axis along which each of the parameters varies too, it sums nothing.

    Raises:
      AxisError: the type of the loss says so.
    """
    bound, known = _jax.bound_axes(), _jax.varying_axes(loss) | _jax.unreduced_axes(loss)
    split = frozenset(bound).intersection(*map(_jax.varying_axes, params))
    further = (axis for axis in bound if axis not in shards.axes and axis not in split)
    over = [axis for axis in further if axis in known and bound[axis] > 1]
    if not over:
        return
    axes = over if len(over) > 1 else over[0]
    number = math.prod(bound[axis] for axis in over)
    named = tuple(axis for axis in bound if axis in (*over, *shards.axes))
    raise AxisError(
        f"The loss varies by its type over {', '.join(map(repr, over))}, which is not among the "
        f"shard axes ({', '.join(map(repr, shards.axes))}), so that autodiff would sum "
        f"the gradient over {number} losses. If these are equal, return jax.lax.pmean(loss, "
        f"{axes!r}); if they are parts of one loss, jax.lax.psum(loss, {axes!r}). If they are of "
        f"rows of their own, write axis_name={named!r}, or jax.lax.pmean where parameters are "
        f"split over {axes!r}."
    )


def _check_bound(axes: tuple[str, ...], bound: dict[str, int]) -> None:
    missing = [axis for axis in axes if axis not in bound]
    if missing:
        raise AxisError(
            f"The axis {missing[0]!r} is not bound here; the bound axes are {_listed(bound)}. "
            f"Name the axis of the shards: axis_name={next(iter(bound))!r}."
        )


def _describe(number: int, axes: tuple[str, ...]) -> Shards:
    mesh_axes = _jax.manual_axes()
    tracked = [_jax.has_vma(axis) for axis in axes]
    if not all(tracked) and any(_jax.has_vma(axis) for axis in mesh_axes):
        # JAX has no collective over vmap's axes under check_vma=True: each fails an assertion.
        loose = [axis for axis, known in zip(axes, tracked, strict=True) if not known]
        raise AxisError(
            f"The axis {loose[0]!r} is a vmap axis inside shard_map(check_vma=True), where JAX "
            f"cannot reduce over it. Pass check_vma=False to that shard_map."
        )
    return Shards(number, axes, manual=mesh_axes.issuperset(axes), has_vma=all(tracked))


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items())
