"""Typed: what JSON has read, as the dataclass that it must be; nobody vouches for such a text."""

import dataclasses
import enum
import types
import typing
from typing import Any


def typed(kind: Any, value: Any) -> Any:
    """What JSON has read, as a value of an annotation.

    Args:
      kind: a dataclass, int from 0, str, a StrEnum, list, tuple, dict, ``… | None`` or Any.
      value: what was read.

    Raises:
      ValueError: it is not one, or has other keys.

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
    elif kind is Any or (type(value) is kind and (kind is str or _is_count(value))):
        return value
    raise ValueError(f"{kind} is not what {value!r:.60} is.")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 1 << 62
