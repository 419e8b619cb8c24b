"""The shard context, groups of shards, and the shards of the bound axes."""

import dataclasses
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from crossshard import _check, _jax
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisError,
    GroupAssignmentError,
    NestedContextError,
    ShardContextError,
    ShardContextWarning,
)

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class ShardContext:
    """The number of shards of a step, and their mesh axes.

    Attributes:
      number_of_shards: the number of shards that run the step.
      axis_name: their mesh axes; empty if none is named.
    """

    number_of_shards: int
    axis_name: tuple[str, ...] = ()


def check_num_shards(num_shards: object) -> int:
    """Return ``num_shards`` as an int of at least 1, or raise an error."""
    return _check.whole_number("num_shards", num_shards, hint="Pass at least 1.")


def check_axis_name(axis_name: object) -> tuple[str, ...]:
    """Return ``axis_name`` as a tuple of distinct names; empty for ``None``."""
    names = () if axis_name is None else axis_name
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
        raise ArgumentTypeError(
            f"axis_name must be a mesh axis's name or a tuple of names; got "
            f"{_check.shown(axis_name)}."
        )
    for name in names:
        _check.word("axis_name", name)
    if len(set(names)) != len(names):
        raise ArgumentError(f"axis_name names an axis twice: {_check.shown(axis_name)}.")
    return tuple(names)


@contextmanager
def shard_context(
    num_shards: int, *, axis_name: str | tuple[str, ...] | None = None
) -> Iterator[ShardContext]:
    """Set the number of shards of the code inside; thread-local.

    The runners do this for you. Like TensorFlow's ``tpu_shard_context``.

    Args:
      num_shards: the number of shards, at least 1.
      axis_name: their mesh axes, if the caller binds them.

    Raises:
      ArgumentError, ArgumentTypeError: ``num_shards`` is not an int of at least 1.
      NestedContextError: a shard context is already set.

    >>> with shard_context(8) as context:
    ...     context.number_of_shards
    8
    """
    context = ShardContext(check_num_shards(num_shards), check_axis_name(axis_name))
    outer = get_shard_context()
    if outer is not None:
        raise NestedContextError(
            f"A shard context of {context.number_of_shards} was entered inside one of "
            f"{outer.number_of_shards}. Contexts do not nest: leave the outer one first, or pass "
            f"group_assignment to reduce over some of the shards."
        )
    _thread.context = context
    try:
        yield context
    finally:
        _thread.context = None


@contextmanager
def as_one_shard(axes: Iterable[str]) -> Iterator[None]:
    """Trace the code inside as if these axes had one shard, with all rows."""
    outer, sizes, axes = get_shard_context(), _jax.bound_axes(), tuple(axes)
    if outer is not None:
        number = outer.number_of_shards // math.prod(sizes.get(axis, 1) for axis in axes)
        _thread.context = dataclasses.replace(outer, number_of_shards=max(number, 1))
    try:
        with _jax.sizes_of_axes(dict.fromkeys(axes, 1)):
            yield
    finally:
        _thread.context = outer


def get_shard_context() -> ShardContext | None:
    """Return the current shard context of this thread, or ``None``.

    >>> get_shard_context() is None
    True
    """
    return getattr(_thread, "context", None)


# ---- Groups, which reduce independently.


@dataclasses.dataclass(frozen=True)
class GroupAssignment:
    """A partition of the shards 0 … N-1 into groups of equal size."""

    groups: tuple[tuple[int, ...], ...]  # one tuple of shard ids per group, in the given order

    @property
    def size(self) -> int:
        """The number of shards in each group."""
        return len(self.groups[0])

    @property
    def number_of_shards(self) -> int:
        """The total number of shards."""
        return self.size * len(self.groups)

    @property
    def members(self) -> np.ndarray:
        """int[groups, size]: the shards of each group."""
        return np.array(self.groups)

    @property
    def group_of(self) -> np.ndarray:
        """int[shards]: the index of each shard's group."""
        return np.argsort(self.members.ravel()) // self.size

    @property
    def position_of(self) -> np.ndarray:
        """int[shards]: the index of each shard in its group."""
        return np.argsort(self.members.ravel()) % self.size

    def check_covers(self, number_of_shards: int) -> None:
        """Raise unless the groups are a partition of exactly this many shards."""
        if self.number_of_shards != number_of_shards:
            raise GroupAssignmentError(
                f"group_assignment {self} must be a permutation of range({number_of_shards}), "
                f"one id for each of the {number_of_shards} shards here; "
                f"it has the ids 0 to {self.number_of_shards - 1}."
            )

    def __str__(self) -> str:
        return str([list(group) for group in self.groups])


def check_group_assignment(group_assignment: Any) -> GroupAssignment | None:
    """Return the checked assignment; ``None`` if all shards are one group, as for ``[]``.

    Args:
      group_assignment: a list of lists of shard ids, as TensorFlow's; no tuples and no array.
    """
    given = group_assignment
    if given is None or isinstance(given, GroupAssignment):
        return given

    def refused(why: str) -> GroupAssignmentError:
        return GroupAssignmentError(
            f"group_assignment must be a list of lists of shard ids, such as [[0, 1], [2, 3]]: "
            f"{why}. Got {_check.shown(given, 200)}."
        )

    if not isinstance(given, list):
        raise refused(f"{type(given).__name__} is not a list")
    if not given:
        return None
    for row in given:
        if not isinstance(row, list):
            raise refused(f"{_check.shown(row)} is not a list")
        for each in row:
            if not isinstance(each, int | np.integer) or isinstance(each, bool):
                name = type(each).__name__
                raise refused(f"the id {_check.shown(each)} is {name}, not an integer")
    groups = tuple(tuple(map(int, row)) for row in given)
    ids = sorted(i for group in groups for i in group)
    repeated = sorted({one for one, other in itertools.pairwise(ids) if one == other})
    if repeated:
        raise refused(f"it has {repeated} more than once")
    if not ids:
        raise refused("its groups are empty")
    if ids != list(range(len(ids))):
        raise refused(f"its ids must be a permutation of range({len(ids)})")
    if len(set(map(len, groups))) > 1:
        raise refused(
            f"its groups must have equal sizes, and have {list(map(len, groups))}: a mean over "
            f"unequal groups would weigh their shards differently"
        )
    return GroupAssignment(groups)


# ---- The shards.


@dataclasses.dataclass(frozen=True)
class Shards:
    """The current shards, and which of them reduce together."""

    num_shards: int  # the number of all shards
    axes: tuple[str, ...] = ()  # their bound axes, major first; empty if none is bound
    manual: bool = False  # whether every axis is a mesh axis, of shard_map or pmap
    has_vma: bool = False  # whether types track what varies over the axes (``check_vma=True``)
    torus_factors: tuple[int, ...] = ()  # factors of a single axis, for multi-stage collectives
    # The other axes of their mesh, over which XLA splits the work of each shard.
    other_axes: tuple[str, ...] = ()
    # The platform of their devices, such as ``"cpu"``; empty if only XLA knows it.
    platform: str = ""
    in_rings: bool = False  # whether matmuls overlap with sending their slices round a ring
    # The number of TPU slices along a single axis. The network between them is slower.
    slices: int = 1
    # The groups that reduce independently; ``None`` for all shards.
    groups: GroupAssignment | None = None

    @property
    def all(self) -> Self:
        """The same shards, all of which reduce together."""
        return self if self.groups is None else dataclasses.replace(self, groups=None)

    @property
    def across(self) -> Self:
        """The same shards, grouped by their position in their groups: one of each group."""
        groups = self.groups
        if groups is None or groups.size == 1:
            return self.all
        columns = GroupAssignment(tuple(map(tuple, groups.members.T.tolist())))
        return dataclasses.replace(self, groups=columns)

    @property
    def group_size(self) -> int:
        """The number of shards that reduce together."""
        return self.num_shards if self.groups is None else self.groups.size

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
        """Whether a sum runs over the last axis, or within a TPU slice, first.

        Then only a part of it crosses the slower network. A gather runs in the other order.
        """
        return self.groups is None and (len(self.axes) > 1 or self.slices > 1)

    def by_platform(self, x: Any, cpu: Callable[[Any], Any], default: Callable[[Any], Any]) -> Any:
        """Return ``cpu(x)`` on CPUs, and else ``default(x)``."""
        if self.platform:
            # Under jax.checkpoint, lax.platform_dependent would choose at run time.
            return cpu(x) if self.platform == "cpu" else default(x)
        return lax.platform_dependent(x, cpu=cpu, default=default)

    def scatter_schedule(self) -> list[tuple[Any, list[list[int]] | None]]:
        """Return the stages of a reduce-scatter: each an axis, and its groups if it is factored.

        Scattering in this order leaves the slices in the order of the shards. Groups have one
        stage, over all axes.
        """
        if self.groups is not None:
            return [(self.axes, self.members)]
        if not self.torus_factors:
            return [(axis, None) for axis in self.axes]
        indices = np.arange(self.num_shards).reshape(self.torus_factors)
        return [
            (self.axes[0], np.moveaxis(indices, factor, -1).reshape(-1, size).tolist())
            for factor, size in enumerate(self.torus_factors)
        ]

    def index(self) -> jax.Array:
        """Return the index of this shard, int32[]."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def index_in_group(self) -> jax.Array:
        """Return this shard's index in its group, int32[]; its slices have the same index."""
        index = self.index()
        return index if self.groups is None else jnp.asarray(self.groups.position_of)[index]

    def as_varying(self, x: Any) -> Any:
        """Return ``x`` cast to varying."""
        return _jax.as_varying(x, self.axes) if self.has_vma else x

    def is_varying(self, x: Any) -> bool:
        """Return whether ``x`` is varying or unreduced, from its type."""
        return bool((_jax.varying_axes(x) | _jax.unreduced_axes(x)) & frozenset(self.axes))

    def invariant_axes(self, x: Any) -> tuple[str, ...]:
        """Return the axes over which ``x`` is invariant, from its type."""
        known = _jax.varying_axes(x) | _jax.unreduced_axes(x)
        return tuple(axis for axis in self.axes if self.has_vma and axis not in known)


def current_shards(
    axis_name: tuple[str, ...] = (),
    groups: GroupAssignment | None = None,
    *,
    warn: bool = True,
    what: str = "CrossShardOptimizer",
) -> Shards:
    """Return the current shards: over the named axes, the context's, or the only bound axis.

    Without bound axes, the number comes from the shard context; without that it is 1, with a
    ``ShardContextWarning`` that names ``what``, if ``warn`` and nothing is traced.

    Raises:
      AxisError: a named axis is not bound but others are, or several are bound and none is named.
      GroupAssignmentError: the groups are not a partition of the shards.
      ShardContextError: the context and the axes have different numbers of shards.
    """
    shards = _current_shards(axis_name, warn, what)
    if groups is not None:
        groups.check_covers(shards.num_shards)
    return dataclasses.replace(shards, groups=groups)


def _current_shards(axis_name: tuple[str, ...], warn: bool, what: str) -> Shards:
    bound = _jax.bound_axes()
    context = get_shard_context()
    axes = axis_name or (context.axis_name if context else ())
    if not bound:
        # No warning under jit, where arrays are global and results are those of all shards.
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
    return _shards_over(axes, number)


def shards_of_gradient(axis_name: tuple[str, ...] = (), params: Iterable[Any] = ()) -> Shards:
    """Return the shards over which a gradient stays local.

    Their axes are the named ones, else the context's, else the only bound axis, else every bound
    axis over which no parameter varies. Axes without ``check_vma=True`` are left out:
    autodiff does not reduce over them.

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


def check_axes_unambiguous(loss: Any, shards: Shards, axis_name: tuple[str, ...]) -> None:
    """Raise if the axes of the batch are ambiguous."""
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


def check_varies_over_shards_only(loss: Any, shards: Shards, params: Iterable[Any]) -> None:
    """Raise if a loss varies over an axis that is not a shard axis: autodiff would sum over it.

    An axis over which all parameters vary, too, is allowed: autodiff sums nothing over it.
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
        f"{axes!r}); if they are parts of one loss, jax.lax.psum(loss, {axes!r}); if they are of "
        f"rows of their own, write axis_name={named!r}."
    )


def _check_bound(axes: tuple[str, ...], bound: dict[str, int]) -> None:
    missing = [axis for axis in axes if axis not in bound]
    if missing:
        raise AxisError(
            f"The axis {missing[0]!r} is not bound here; the bound axes are {_listed(bound)}. "
            f"Name the axis of the shards: axis_name={next(iter(bound))!r}."
        )


def _shards_over(axes: tuple[str, ...], number: int) -> Shards:
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
