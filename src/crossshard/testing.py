"""Assertions about communication, for your own tests."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from crossshard._annotations import PyTree
from crossshard.errors import CommunicationError
from crossshard.tools.inspection.inspect import (
    Communication,
    Contract,
    HasLower,
    Program,
    inspect,
    program_of,
)

__all__ = ["assert_communication"]


def assert_communication(
    step: Callable[..., PyTree] | HasLower | Program,
    *args: PyTree,
    max_bytes_ratio: float = 1.0,
    forbid: Iterable[str] = (),
    in_loop: bool = False,
    min_hidden: float | Mapping[str, float] | None = None,
    parameters: PyTree | int | None = None,
    axis_name: str | Sequence[str] | None = None,
    **kwargs: PyTree,
) -> Communication:
    """Assert that a step sends at most ``max_bytes_ratio`` times the lower bound.

    Scalars, such as losses and metrics, are not counted.

    Args:
      step: a function, with ``jax.jit`` or without, or anything that has ``lower``; or a lowered
        or compiled program, without arguments.
      *args: the arguments to lower the step with, as arrays or ``jax.ShapeDtypeStruct``.
      max_bytes_ratio: the allowed multiple of the report's ``lower_bound`` per shard, plus 0.5% for
        padding and 16 numbers of 32 bits for losses and metrics in a bucket of gradients.
        Parameters of fewer than 32 bits may be sent once in 32, in which their gradients are
        summed; the ratio of the report counts that in full. ``float("inf")`` allows any amount.
      forbid: kinds of collectives that must not occur, such as ``"all-reduce"``.
      in_loop: whether collectives are allowed in loops that send more than the lower bound, or take
        several steps. Loops over layers that send each layer once are always allowed.
      min_hidden: the least share of the bytes sent that must be under way while a matrix product
        is scheduled; or one for each of some kinds, such as ``{"reduce-scatter": 0.85}`` for the
        gradients of a sharded update. Synchronous collectives are never hidden, so compile for the
        devices that train.
      parameters: what the step trains, or its bytes, unless it is a ``TrainStep``; see
        ``crossshard.inspect``. If your step has an argument of this name, pass a
        ``functools.partial`` or the lowered step.
      axis_name: the mesh axes that split the batch; by default those of a ``TrainStep``, or all.
      **kwargs: the keyword arguments to lower the step with.

    Returns:
      The report of ``crossshard.inspect``, for further assertions.

    Raises:
      CommunicationError: an ``AssertionError`` with a table of the offending collectives.
      ArgumentError: an unknown kind in ``forbid`` or ``min_hidden``, a ratio that is not a number
        of at least 0, a share that is not one from 0 to 1, or an axis that the mesh lacks.
      ArgumentTypeError: ``step`` cannot be lowered, a program is passed with arguments, or
        ``forbid`` or ``in_loop`` has an invalid type.

    >>> import jax.numpy as jnp
    >>> assert_communication(lambda w: w - 0.1 * w, jnp.zeros(3)).bytes_sent
    0
    """
    contract = Contract(max_bytes_ratio, forbid, in_loop, min_hidden)
    report = inspect(program_of(step, args, kwargs), parameters, axis_name=axis_name)
    if breaches := list(contract.breaches(report)):
        raise CommunicationError("\n\n".join(f"{words}:\n{table}" for words, table in breaches))
    return report
