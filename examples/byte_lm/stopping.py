"""Stops a run early: on a signal, or if a file or the screen cannot be written to."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Self

from crossshard.errors import CheckpointError
from examples.byte_lm.processes import Processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"
# Beyond every number of a signal.
_FAILED = 1000


class Stopping:
    """A context in which the first signal lets the current step finish; a second one ends it all.

    Args:
      processes: those that stop together.

    Attributes:
      signal: the first one that came, to any of the processes; ``None`` before.
      failure: the message of the first failed write; ``None`` without one.
    """

    def __init__(self, processes: Processes) -> None:
        self.signal: int | None = None
        self.failure: str | None = None
        self._processes, self._has_come = processes, False

    def agree(self) -> bool:
        """Whether to stop; all processes ask at the same point, and get the same answer."""
        found = self._processes.largest(_FAILED if self.failure else self.signal or 0)
        if found == _FAILED:
            self.failure = self.failure or "Process 0 cannot write what it should."
        elif found and self.signal is None:
            self.signal = found
        return found > 0

    @contextlib.contextmanager
    def writing(self, what: object) -> Iterator[None]:
        """A context in which an error asks the run to stop; other writes are still tried."""
        try:
            yield
        except OSError as error:
            self.failure = self.failure or f"Cannot write to {what}: {error.strerror or error}."
        except CheckpointError as error:
            self.failure = self.failure or str(error)

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._remember)
            for number in _SIGNALS
            # nohup, and a shell that starts a background job, ignore these signals.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Others may have told of it already: a launcher sends it to one process after the other.
        if self._has_come:
            # An exception may be caught, or wait for other processes.
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            complain("stopped at once; metrics.jsonl has every step that was taken.")
            os._exit(128 + number)
        self._has_come, self.signal = True, self.signal or number


def complain(why: str) -> None:
    """Print the reason of a failure on stderr, in one line."""
    try:
        print("byte_lm: " + " ".join(why.split()), file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def discard(descriptor: int) -> None:
    """Let Python write nowhere what it still has for a stream that is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
