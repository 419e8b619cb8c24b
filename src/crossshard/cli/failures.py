"""Whatever the user's own code raises, in one sentence."""

import contextlib
import textwrap
import traceback
from collections.abc import Iterator

from crossshard.errors import ArgumentError, CrossshardError
from crossshard.inspection.source import users_line

# Of what an exception says. JAX's may fill pages.
_LONGEST = 600


@contextlib.contextmanager
def in_one_sentence(what: str) -> Iterator[None]:
    """Turn whatever is raised into an ``ArgumentError`` of one sentence.

    Args:
      what: how the sentence begins: what has failed.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        line = _line_of(error)
        said = textwrap.shorten(str(error), _LONGEST, placeholder=" …")
        if line or not isinstance(error, CrossshardError):
            said = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise ArgumentError(f"{what}: {said}{f' ({line})' if line else ''}") from error


def _line_of(error: BaseException) -> str | None:
    """The innermost line of the user's that an error comes from, where there is one."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return users_line(f"{frame.filename}:{frame.lineno}" for frame in frames)
