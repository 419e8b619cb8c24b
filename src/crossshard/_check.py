"""Checks of arguments: each returns the checked value, or raises an error with what to write.

A wrong type raises an ``ArgumentTypeError``, and a wrong value an ``ArgumentError``. ``name`` is
the argument's name in the caller's code; ``hint`` is a sentence at the end of the message.
"""

import dataclasses
import enum
import numbers
import operator
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from crossshard._flax import nnx
from crossshard.errors import ArgumentError, ArgumentTypeError, CrossshardError

_E = TypeVar("_E", bound=enum.Enum)
# Counts are held in int32[].
_MOST = 2**31 - 1


def choice(name: str, given: object, among: type[_E], hint: str = "") -> _E:
    """Return the member of an enum that a string names."""
    values = [each.value for each in among]
    # The type comes first: an array compares element by element.
    if isinstance(given, str) and given in values:
        return among(given)
    *first, last = map(repr, values)
    words = f"{', '.join(first)} or {last}"
    raise ArgumentError(f"{name} must be {words}; got {shown(given)}.{_after(hint)}")


def word(name: str, given: object, hint: str = "") -> str:
    """Return a non-empty, printable string, for a program, a profile or a message."""
    if not isinstance(given, str):
        raise ArgumentTypeError(f"{name} must be a string; got {described(given)}.{_after(hint)}")
    if not given:
        raise ArgumentError(f"{name} must not be empty.{_after(hint)}")
    if not given.isprintable():
        raise ArgumentError(f"{name} must be printable; got {shown(given)}.{_after(hint)}")
    return given


def whole_number(
    name: str, given: Any, least: int | None = 1, hint: str = "", *, most: int | None = _MOST
) -> int:
    """Return an int, also from numpy; if ``least`` is ``None`` any, else one up to ``most``."""
    try:
        found = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        found = None
    if found is None:
        what = "an int" if least is None else f"an int of at least {least}"
        raise ArgumentTypeError(f"{name} must be {what}; got {described(given)}.{_after(hint)}")
    if least is not None and found < least:
        raise ArgumentError(f"{name} must be at least {least}; got {found}.{_after(hint)}")
    if least is not None and most is not None and found > most:
        raise ArgumentError(f"{name} must be at most {most}; got {shown(found)}.{_after(hint)}")
    return found


def index(name: str, given: Any, number: int, of: str) -> int:
    """Return an index below ``number``; ``of`` names what is counted, such as ``"shards"``."""
    found = whole_number(name, given, least=None)
    if not 0 <= found < number:
        raise ArgumentError(
            f"{name} must be one of the {number} {of}, 0 to {number - 1}; got {shown(found)}."
        )
    return found


def number(name: str, given: Any, hint: str = "") -> float:
    """Return a real number as a float."""
    if isinstance(given, np.ndarray) and given.shape == ():
        given = given.item()
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number; got {described(given)}.{_after(hint)}")
    try:
        return float(given)
    except OverflowError:
        raise ArgumentError(f"{name} is too large: {shown(given)}.{_after(hint)}") from None


def finite(name: str, given: Any, hint: str = "") -> None:
    """Raise unless a number is finite. Traced values and arrays on devices are not checked."""
    wide = jax.dtypes.canonicalize_dtype(float)
    if not isinstance(given, jax.Array) and not np.isfinite(np.asarray(given, wide)).all():
        raise ArgumentError(f"{name} must be finite; got {shown(given)}.{_after(hint)}")


def flag(name: str, given: object) -> bool:
    """Return a bool, also from numpy."""
    if not isinstance(given, bool | np.bool_):
        raise ArgumentTypeError(f"{name} must be True or False; got {described(given)}.")
    return bool(given)


def function(name: str, given: object) -> Callable[..., Any]:
    """Return a function, or anything else that can be called."""
    if not callable(given):
        raise ArgumentTypeError(f"{name} must be a function; got {described(given)}.")
    return given


def array(name: str, given: Any, *, or_type: bool = False) -> Any:
    """Return a number or an array that JAX can hold; with ``or_type`` also its type."""
    if isinstance(given, jax.core.Tracer) or (or_type and isinstance(given, jax.ShapeDtypeStruct)):
        return given
    if isinstance(given, jax.Array):
        if given.is_deleted():
            raise ArgumentError(
                f"{name} is an array that was deleted: it was donated to a step, or to a jax.jit, "
                f"or .delete() was called. Pass what the step returned, or write "
                f"make_train_step(..., donate=False)."
            )
    elif isinstance(given, jax.ShapeDtypeStruct):
        raise ArgumentTypeError(
            f"{name} is a jax.ShapeDtypeStruct, which has a type and no values. Pass an array; to "
            f"compile for types, write step.lower(step.abstract_init(types), types)."
        )
    else:
        try:
            jax.typeof(given)
        except (TypeError, ValueError, OverflowError) as error:
            kind = ArgumentError if isinstance(error, OverflowError) else ArgumentTypeError
            raise kind(
                f"{name} must be an array or a number that JAX can hold; got {described(given)}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from None
    return given


def arrays(name: str, tree: Any, *, or_types: bool = False) -> None:
    """Raise unless ``array`` takes every leaf of a tree; the error names the leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            array(name, leaf, or_type=or_types)
        except CrossshardError:
            # Naming every leaf would be slow.
            array(f"{name}{jax.tree_util.keystr(path)}", leaf, or_type=or_types)


def as_array(name: str, given: Any) -> jax.Array:
    """Return a ``jax.Array``, from a value that ``array`` takes or from lists of such values."""
    if not isinstance(given, list | tuple):
        return jnp.asarray(array(name, given))
    for leaf in jax.tree.leaves(given):
        array(name, leaf)
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{name} must be an array or a number; got {described(given)}."
        ) from None


def is_number(leaf: Any) -> bool:
    """Return whether a leaf is an array or a Python number, including a bool.

    >>> is_number(3), is_number("3")
    (True, False)
    """
    return hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)


def is_inexact(leaf: Any) -> bool:
    """Return whether a number is floating or complex, so that it can be differentiated."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def scalar(value: Any, what: str = "A loss", kinds: tuple[Any, ...] = (jnp.floating,)) -> Any:
    """Return a scalar of one of these kinds of dtype, also from an NNX variable."""
    value = value.get_value() if isinstance(value, nnx.Variable) else value
    if not is_number(value):
        raise ArgumentTypeError(f"{what} must be a floating scalar; got {type(value).__name__}.")
    array(what, value)
    dtype, shape = jnp.result_type(value), jnp.shape(value)
    if shape != ():
        raise ArgumentError(
            f"{what} must be a floating scalar; got {dtype}[{','.join(map(str, shape))}], of shape "
            f"{shape}. Reduce it first: a loss with jnp.mean, a total or a count of rows "
            f"with jnp.sum."
        )
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise ArgumentTypeError(f"{what} must be a floating scalar; got {dtype}[].")
    return value


def described(given: object) -> str:
    """Describe a value and its type.

    >>> described("eight")
    "'eight' (str)"
    """
    return f"{shown(given)} ({type(given).__name__})"


def shown(given: object, width: int = 60) -> str:
    """Return the beginning of a value's text, also if its ``repr`` raises, as of a deleted array.

    >>> shown("eight" * 4, 8)
    "'eighte…"
    """
    try:
        text = repr(given)
    except Exception:  # the caller is about to refuse the value
        text = f"<{type(given).__name__}>"
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _after(hint: str) -> str:
    return f" {hint}" if hint else ""


def typed(kind: Any, value: Any) -> Any:
    """Convert a value that was read from untrusted JSON to the type of an annotation.

    The annotation is a dataclass, int from 0, str, a StrEnum, list, tuple, dict, ``… | None`` or
    Any. Raises a ``ValueError`` if the value does not fit it, or has other keys.

    >>> typed(dict[str, tuple[int, ...]], {"shape": [3, 4]})
    {'shape': (3, 4)}
    """
    of, origin = typing.get_args(kind), typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if isinstance(value, dict) and value.keys() == hints.keys():
            return kind(**{name: typed(hints[name], value[name]) for name in hints})  # type: ignore[operator]
    elif origin is types.UnionType:
        return None if value is None else typed(of[0], value)
    elif isinstance(kind, enum.EnumType):
        return kind(value)
    elif origin in (list, tuple) and isinstance(value, list):
        return origin(typed(of[0], each) for each in value)
    elif origin is dict and isinstance(value, dict):
        return {key: typed(of[1], each) for key, each in value.items()}
    elif (
        kind is Any
        or (kind is str and type(value) is str)
        or (kind is int and type(value) is int and 0 <= value <= 1 << 62)
    ):
        return value
    raise ValueError(f"{kind} is not what {value!r:.60} is.")


def dtype(name: str, given: Any, among: Sequence[str], words: str) -> Any:
    """Return the dtype that an option gives; ``None`` without one."""
    if given is None or dtype_name(given) in among:
        return None if given is None else jnp.dtype(given)
    raise ArgumentError(f"{name} must be {words}; got {shown(given)}.")


def dtype_name(given: Any) -> str | None:
    """Return the name of a dtype; ``None`` of what is none."""
    # Not an array, which has a dtype but was probably meant for something else.
    if not isinstance(given, str | type | np.dtype):
        return None
    try:
        return str(jnp.dtype(given).name)
    except (TypeError, ValueError):  # a word that is not a dtype, or cannot be encoded
        return None
