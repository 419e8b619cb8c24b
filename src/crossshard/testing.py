"""Assertions for users' own tests of what their steps send."""

from collections.abc import Iterable
from typing import Any

from crossshard.errors import CommunicationError
from crossshard.inspection.contract import Contract
from crossshard.inspection.program import inspect, program_of
from crossshard.inspection.report import Communication

__all__ = ["assert_communication"]


def assert_communication(
    step: Any,
    *args: Any,
    max_bytes_ratio: float = 1.0,
    forbid: Iterable[str] = (),
    in_loop: bool = False,
    parameters: Any = None,
    **kwargs: Any,
) -> Communication:
    """Fail a test whose step sends more than it must.

    Operands of one element, such as losses and metrics, are free everywhere.

    Args:
      step: a function, with ``jax.jit`` or without, or anything that has ``lower``; or a program
        that is lowered or compiled already, without arguments.
      *args: what to lower the step for, as arrays or ``jax.ShapeDtypeStruct``.
      max_bytes_ratio: how many times the lower bound, 2(N−1)/N · P, a shard may send; half a
        percent more is allowed, for padding, and 16 numbers of 32 bits, for losses and metrics in
        a bucket of gradients. Parameters of fewer than 32 bits may be sent once in 32, in which
        their gradients are summed; the ratio of the report counts that in full.
        ``float("inf")`` for any number.
      forbid: kinds of collectives that must not be there, such as ``"all-reduce"``.
      in_loop: whether collectives may stand in a loop.
      parameters: the parameters, or their bytes, where the program does not tell them; see
        ``crossshard.inspect``. A step that takes an argument of this name is given as
        ``functools.partial``, or lowered.
      **kwargs: what else to lower the step for.

    Returns:
      The report of ``crossshard.inspect``, for further assertions.

    Raises:
      CommunicationError: an ``AssertionError`` whose message shows the collectives at fault.
      ArgumentError: a kind to forbid that does not exist, or a ratio that is not a number from 0
        on.
      ArgumentTypeError: the step is not a step, arguments are given to a program, or ``forbid`` or
        ``in_loop`` is of another type.

    >>> import jax.numpy as jnp
    >>> assert_communication(lambda w: w - 0.1 * w, jnp.zeros(3)).bytes_sent
    0
    """
    contract = Contract(max_bytes_ratio, forbid, in_loop)
    report = inspect(program_of(step, args, kwargs), parameters)
    faults = contract.faults(report)
    if faults:
        raise CommunicationError("\n\n".join(map(str, faults)))
    return report
