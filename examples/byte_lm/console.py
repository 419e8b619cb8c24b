"""Standard output and error; a run goes on without them if they cannot be written to."""

import io
import os
import sys
from collections.abc import Callable
from typing import IO, TextIO, cast

from rich.console import Console


def make_console(fail: Callable[[str], None], *, silent: bool = False) -> Console:
    """A console on stdout.

    Args:
      fail: called once with a message when stdout cannot be written to any more.
      silent: print nothing, since another process does.
    """
    if silent:
        return Console(file=io.StringIO(), quiet=True)
    # Do not wrap lines in a file or pipe.
    width = None if sys.stdout.isatty() else 1000
    return Console(file=cast(IO[str], _Output(fail)), highlight=False, width=width)


def complain(why: str) -> None:
    """Print the reason of a failure on stderr, in one line."""
    try:
        print("byte_lm: " + " ".join(why.split()), file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """What is still in its buffer must go somewhere when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Output(io.TextIOBase):
    def __init__(self, fail: Callable[[str], None]) -> None:
        self._stream = sys.stdout
        self._fail = fail

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._fail(f"Cannot write to standard output: {error.strerror}.")
        _discard(self._stream)
