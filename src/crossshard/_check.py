"""Checks of arguments: each returns what is right, or says what was given and what to write."""

import enum
import numbers
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from crossshard.errors import ArgumentError, ArgumentTypeError

_E = TypeVar("_E", bound=enum.Enum)


def choice(name: str, given: object, among: type[_E], hint: str = "") -> _E:
    """One of a few words, as the member of an enum.

    Args:
      name: that of the argument, here and below.
      given: the member, or its word.
      among: the enum.
      hint: a sentence after a refusal.

    Raises:
      ArgumentError: it is none of them.
    """
    try:
        return among(given)
    except ValueError:
        *first, last = [repr(each.value) for each in among]
        words = f"{', '.join(first)} or {last}"
        got = f"{given!r:.60}.{_after(hint)}"
        raise ArgumentError(f"{name} must be {words}; got {got}") from None


def whole_number(name: str, given: Any, least: int | None = 1, hint: str = "") -> int:
    """An int, which may be numpy's; of any size if ``least`` is ``None``.

    Raises:
      ArgumentError: it is too small.
      ArgumentTypeError: it is none; True and False are none.
    """
    try:
        found = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        found = None
    if found is None:
        what = "an int" if least is None else f"an int of at least {least}"
        raise ArgumentTypeError(f"{name} must be {what}; got {described(given)}.{_after(hint)}")
    if least is not None and found < least:
        raise ArgumentError(f"{name} must be at least {least}; got {found}.{_after(hint)}")
    return found


def number(name: str, given: Any) -> float:
    """A real number.

    Raises:
      ArgumentTypeError: it is none; True and False are none.
    """
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number; got {described(given)}.")
    return float(given)


def flag(name: str, given: object) -> bool:
    """True or False.

    Raises:
      ArgumentTypeError: it is neither.
    """
    if not isinstance(given, bool):
        raise ArgumentTypeError(f"{name} must be True or False; got {described(given)}.")
    return given


def function(name: str, given: object) -> Callable[..., Any]:
    """What can be called.

    Raises:
      ArgumentTypeError: it cannot.
    """
    if not callable(given):
        raise ArgumentTypeError(f"{name} must be a function; got {described(given)}.")
    return given


def described(given: object) -> str:
    """What was given, and its type.

    >>> described("eight")
    "'eight' (str)"
    """
    return f"{given!r:.60} ({type(given).__name__})"


def _after(hint: str) -> str:
    return f" {hint}" if hint else ""
