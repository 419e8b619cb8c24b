"""Assertions for users' own tests of what their steps send."""

import math
import numbers
from collections.abc import Iterable
from typing import Any

import jax

from crossshard.errors import ArgumentError, ArgumentTypeError, CommunicationError
from crossshard.inspection.collectives import KINDS, Collective, bytes_sent
from crossshard.inspection.program import inspect
from crossshard.inspection.report import Communication, collective_table

__all__ = ["assert_communication"]

# Padding to whole shards sends this much more than the parameters' own bytes.
_PADDING = 0.005
# Losses and metrics may travel in the same bucket as small gradients: so many numbers of 32 bits.
_NUMBERS = 16


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
        a bucket of gradients. ``float("inf")`` for any number.
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
      ArgumentError: a kind to forbid that does not exist, or a ratio that is no number from 0 on.
      ArgumentTypeError: the step is no step, arguments are given to a program, or ``forbid`` or
        ``in_loop`` is of another type.

    >>> import jax.numpy as jnp
    >>> assert_communication(lambda w: w - 0.1 * w, jnp.zeros(3)).bytes_sent
    0
    """
    forbidden = _check_kinds(forbid)
    _check_ratio(max_bytes_ratio)
    if not isinstance(in_loop, bool):
        raise ArgumentTypeError(f"in_loop must be True or False; got {in_loop!r}.")
    report = inspect(_program(step, args, kwargs), parameters)
    sending = [each for each in report.collectives if each.bytes_sent]
    faults = [
        *_forbidden(sending, forbidden),
        *([] if in_loop else _looping(sending)),
        *_too_much(sending, report, float(max_bytes_ratio)),
    ]
    if faults:
        raise CommunicationError("\n\n".join(faults))
    return report


def _program(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_program(step):
        if args or kwargs:
            raise ArgumentTypeError(
                f"assert_communication takes arguments for a step; {type(step).__name__} has its "
                f"own already, so leave out the {len(args) + len(kwargs)} given."
            )
        return step
    # A string has a method lower, too.
    if hasattr(step, "lower") and not isinstance(step, str):
        return step.lower(*args, **kwargs)
    if not callable(step):
        raise ArgumentTypeError(
            "assert_communication takes a step: a function, anything with a method lower, or a "
            f"lowered or compiled program; got {type(step).__name__}."
        )
    return jax.jit(step).lower(*args, **kwargs)


def _is_program(step: Any) -> bool:
    stages = jax.stages.Lowered | jax.stages.Compiled | jax.stages.Traced
    # Flax wraps what JAX lowers and compiles.
    return isinstance(getattr(step, "compiled", getattr(step, "lowered", step)), stages)


def _check_kinds(forbid: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(forbid, Iterable):
        raise ArgumentTypeError(
            f'forbid must be kinds of collectives, as ("all-reduce",); got {forbid!r}.'
        )
    kinds = (forbid,) if isinstance(forbid, str) else tuple(forbid)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ArgumentError(
            f"forbid names kinds of collectives, of {', '.join(KINDS)}; got {unknown[0]!r}."
        )
    return kinds


def _check_ratio(ratio: Any) -> None:
    if not isinstance(ratio, numbers.Real) or isinstance(ratio, bool) or not float(ratio) >= 0:
        raise ArgumentError(f"max_bytes_ratio must be a number of at least 0; got {ratio!r}.")


def _forbidden(sending: list[Collective], forbidden: tuple[str, ...]) -> list[str]:
    found = [each for each in sending if each.kind in forbidden]
    kinds = ", ".join(kind for kind in forbidden if kind in {each.kind for each in found})
    return [f"The step has what is forbidden, {kinds}:\n{collective_table(found)}"] if found else []


def _looping(sending: list[Collective]) -> list[str]:
    found = [each for each in sending if each.in_loop]
    if not found:
        return []
    return [
        "The step communicates within a loop; reduce gradients once after it, or say in_loop=True "
        f"where that is meant, as with layers that are gathered one by one:\n"
        f"{collective_table(found)}"
    ]


def _too_much(sending: list[Collective], report: Communication, allowed: float) -> list[str]:
    if not sending or math.isinf(allowed):
        return []
    if not report.lower_bound:
        return [
            "The step communicates, and which of its inputs are parameters cannot be told from "
            "its program. Give parameters=, as arrays or a number of bytes, or "
            f'max_bytes_ratio=float("inf"):\n{report.table()}'
        ]
    if report.uncounted_loops:
        return [
            "The step communicates in a loop whose length its program does not tell, so what it "
            'sends cannot be counted. Give the loop a fixed length, or max_bytes_ratio=float("inf")'
            f":\n{collective_table(report.uncounted_loops)}"
        ]
    beside = bytes_sent("all-reduce", report.shards, _NUMBERS * 4)
    if report.bytes_sent <= allowed * report.lower_bound * (1 + _PADDING) + beside:
        return []
    return [
        f"The step sends {report.bytes_sent / report.lower_bound:.3f} times the lower bound, and "
        f"{allowed:g} is allowed:\n{report.table()}"
    ]
