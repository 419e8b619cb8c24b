"""Loads a user's factory, and lowers the step that it returns."""

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from crossshard.errors import ArgumentError
from crossshard.tools.cli.failures import in_one_sentence
from crossshard.tools.inspection.inspect import is_program, program_of


def make_program(name: str) -> Any:
    """The program of the step that a factory returns, lowered for its arguments.

    The factory's own output goes to stderr.

    Args:
      name: ``package.module:factory``; the current directory is on the path.

    Raises:
      ArgumentError: the factory does not exist, fails, or does not return a step.
    """
    returned = call_factory(name)
    with contextlib.redirect_stdout(sys.stderr):
        if is_program(returned):
            return returned
        if not isinstance(returned, tuple) or not returned:
            raise ArgumentError(
                f"{name} returned {_described(returned)}; it must return (step, args…), or a "
                "lowered or compiled program."
            )
        step, *args = returned
        with in_one_sentence(f"The step of {name} cannot be lowered"):
            return program_of(step, args, {})


def call_factory(name: str) -> Any:
    """What a factory returns; its own output goes to stderr.

    Args:
      name: ``package.module:factory``; the current directory is on the path.

    Raises:
      ArgumentError: the factory does not exist, or fails.
    """
    with contextlib.redirect_stdout(sys.stderr):
        factory = _load(name)
        with in_one_sentence(f"{name} raised"):
            return factory()


def _load(name: str) -> Callable[[], Any]:
    module_name, _, attribute = name.partition(":")
    is_module = all(part.isidentifier() for part in module_name.split("."))
    if not attribute or not is_module or module_name.endswith(".py"):
        raise ArgumentError(
            f"Name the factory as package.module:factory, for example train:make for make in "
            f"train.py; got {name!r}."
        )
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with in_one_sentence(f"{module_name} cannot be imported"):
            found: Any = importlib.import_module(module_name)
    except ArgumentError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and _is_part(missing.name, module_name):
            raise ArgumentError(
                f"There is no module {missing.name} in {os.getcwd()} or elsewhere on the path."
            ) from missing
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ArgumentError(f"{module_name} has no {attribute}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(
            f"{name} must be a function without arguments; got {_described(found)}."
        )
    return found


def _is_part(missing: str | None, module_name: str) -> bool:
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


def _described(value: Any) -> str:
    name = getattr(value, "__name__", None)
    return f"{type(value).__name__} {name}" if name else type(value).__name__
