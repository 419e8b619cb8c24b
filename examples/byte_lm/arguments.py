"""Parses the command line with tyro."""

import types
import typing
from collections.abc import Sequence
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from examples.byte_lm.options import TrainOptions

AUTO = "auto"


def parse(words: Sequence[str] | None) -> TrainOptions:
    """The options that the words spell, those of this process if ``None``.

    Raises:
      SystemExit: help is requested, or an option is wrong; tyro has printed why.
    """
    registry = ConstructorRegistry()
    registry.primitive_rule(_one_word_or_none)
    return tyro.cli(TrainOptions, prog="python -m examples.byte_lm", args=words, registry=registry)


def _one_word_or_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Let ``auto`` be the word for leaving the choice to us; help then shows it as the default."""
    choices = typing.get_args(info.type)
    if info.type_origin is not types.UnionType or types.NoneType not in choices:
        return None
    (kind,) = (choice for choice in choices if choice is not types.NoneType)
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar={str: "TEXT"}.get(kind, kind.__name__.upper()),
        instance_from_str=lambda words: None if words[0] == AUTO else kind(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [AUTO if value is None else str(value)],
    )
