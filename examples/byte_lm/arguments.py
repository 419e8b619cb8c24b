"""The words after `crossshard`, read by tyro; its boxed complaints become our one line."""

import contextlib
import io
import itertools
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from benchmarks.options import BenchOptions
from crossshard.errors import ArgumentError
from examples.byte_lm.options import TrainOptions

AUTO = "auto"

_COMMANDS: dict[str, Callable[..., Any]] = {"train": TrainOptions, "bench": BenchOptions}

_DESCRIPTION = """Wrap any Optax optimizer, and every shard steps correctly.

`crossshard train` trains a small model to show it, `crossshard bench` measures it against others;
each says more with --help. `crossshard --version` says which version this is."""


def parse(words: Sequence[str]) -> TrainOptions | BenchOptions:
    """The options that the words of a command line spell; prints help and exits if they ask for it.

    Raises:
      ArgumentError: they spell nothing that there is, or a value that cannot be used.
    """
    registry = ConstructorRegistry()
    registry.primitive_rule(_one_word_or_none)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.extras.subcommand_cli_from_dict(
                _COMMANDS,
                prog="crossshard",
                description=_DESCRIPTION,
                args=words,
                registry=registry,
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise
    command = f" {words[0]}" if words and words[0] in _COMMANDS else ""
    raise ArgumentError(f"{_sentence(complaint.getvalue())}. See crossshard{command} --help.")


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


def _sentence(box: str) -> str:
    """What a box says between its title and its first rule, drawn in ASCII or better."""
    lines = itertools.dropwhile(_is_rule, box.splitlines()[1:])
    said = [line.strip("│ ") for line in itertools.takewhile(lambda x: not _is_rule(x), lines)]
    return " ".join(said).rstrip(".")


def _is_rule(line: str) -> bool:
    return not line.strip("│╭╮╰╯─- ")
