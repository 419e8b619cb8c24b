"""The shard context: the number of shards of the running step."""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crossshard import _check
from crossshard.errors import ArgumentError, ArgumentTypeError, NestedContextError

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
    """``num_shards`` as an int of at least 1, or an error."""
    return _check.whole_number("num_shards", num_shards, hint="Pass at least 1.")


def check_axis_name(axis_name: object) -> tuple[str, ...]:
    """``axis_name`` as a tuple of distinct names; empty for ``None``."""
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


def get_shard_context() -> ShardContext | None:
    """The current shard context of this thread, or ``None``.

    >>> get_shard_context() is None
    True
    """
    return getattr(_thread, "context", None)
