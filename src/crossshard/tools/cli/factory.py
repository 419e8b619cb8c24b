"""Loads a user's factory, lowers the step that it returns, and says in a line what fails in it."""

import contextlib
import os
import pkgutil
import sys
import textwrap
import traceback
from collections.abc import Iterator
from typing import Any

from crossshard.errors import ArgumentError, CrossshardError
from crossshard.tools.inspection.inspect import is_program, program_of
from crossshard.tools.inspection.source import users_line

# The longest message shown, since JAX's may fill pages.
_LONGEST = 600


def make_program(name: str) -> Any:
    """The program of the step that a factory returns, lowered for its arguments.

    Args:
      name: as for ``call_factory``.

    Raises:
      ArgumentError: the factory does not exist, fails, or does not return a step.
    """
    returned = call_factory(name)
    if is_program(returned):
        return returned
    if not isinstance(returned, tuple) or not returned:
        raise ArgumentError(
            f"{name} returned {type(returned).__name__}; it must return (step, args…), or a "
            "lowered or compiled program."
        )
    step, *args = returned
    with in_one_sentence(f"The step of {name} cannot be lowered"):
        return program_of(step, args, {})


def call_factory(name: str) -> Any:
    """What a factory returns.

    Args:
      name: ``package.module:factory``; the current directory is on the path.

    Raises:
      ArgumentError: the factory does not exist, or fails.
    """
    module, _, attribute = name.partition(":")
    if not attribute or module.endswith(".py"):
        raise ArgumentError(
            f"Name the factory as package.module:factory, for example train:make for make in "
            f"train.py; got {name!r}."
        )
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with in_one_sentence(f"{name} cannot be imported in {os.getcwd()}"):
        factory = pkgutil.resolve_name(name)
    if not callable(factory):
        what = type(factory).__name__
        raise ArgumentError(f"{name} must be a function without arguments; got {what}.")
    with in_one_sentence(f"{name} raised"):
        return factory()


@contextlib.contextmanager
def in_one_sentence(what: str) -> Iterator[None]:
    """Run the user's code: any exception becomes an ``ArgumentError``; its output goes to stderr.

    Args:
      what: the start of the sentence, which names what failed.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = users_line(f"{frame.filename}:{frame.lineno}" for frame in frames)
        message = textwrap.shorten(str(error), _LONGEST, placeholder=" …")
        if line or not isinstance(error, CrossshardError):
            message = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise ArgumentError(f"{what}: {message}{f' ({line})' if line else ''}") from error
