"""Turns exceptions of the user's code into one-sentence errors."""

import contextlib
import textwrap
import traceback
from collections.abc import Iterator

from crossshard.errors import ArgumentError, CrossshardError
from crossshard.tools.inspection.source import users_line

# The longest message shown, since JAX's may fill pages.
_LONGEST = 600


@contextlib.contextmanager
def in_one_sentence(what: str) -> Iterator[None]:
    """Turn any exception into an ``ArgumentError`` of one sentence.

    Args:
      what: the start of the sentence, which names what failed.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        line = _line_of(error)
        message = textwrap.shorten(str(error), _LONGEST, placeholder=" …")
        if line or not isinstance(error, CrossshardError):
            message = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise ArgumentError(f"{what}: {message}{f' ({line})' if line else ''}") from error


def _line_of(error: BaseException) -> str | None:
    """The innermost line of user code that an error comes from, or ``None``."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return users_line(f"{frame.filename}:{frame.lineno}" for frame in frames)
