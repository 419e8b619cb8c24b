"""Stops a run early: on a signal, or if a file or the screen cannot be written to."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Self

# This file imports nothing else, so that the handler is set before JAX is imported.
from examples.byte_lm.exit_codes import STOPPED

if TYPE_CHECKING:
    from examples.byte_lm.processes import Processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"
# Beyond every number of a signal.
_FAILED = 1000


class Stopping:
    """A context in which a signal asks the run to stop.

    Before ``begin`` the process ends at once, for nothing has been written. From then on the first
    signal is remembered, for the run to stop after the current step; the second one skips what is
    being computed, and leaves what is written; the third ends the process at once. One of several
    processes can skip nothing, since the others wait for it; there the second one ends it at once.

    Attributes:
      signal: the first one that came; ``None`` before.
      failure: the message of a failed write; ``None`` without one.
      skipped: whether a second signal has interrupted something.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.failure: str | None = None
        self.skipped = False
        self._begun = False
        self._skippable = False
        self._came = 0
        self._largest: Callable[[int], int] = lambda value: value
        self._of_several = False

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self.signal is not None or self.failure is not None

    def join(self, processes: "Processes") -> None:
        """From now on ``agree`` asks these processes."""
        self._largest = processes.largest
        self._of_several = processes.number > 1

    def agree(self) -> bool:
        """Whether to stop; all processes ask at the same point, and get the same answer."""
        own = _FAILED if self.failure else self.signal or 0
        found = self._largest(own)
        if found == _FAILED:
            self.fail("Process 0 cannot write what it should.")
        elif found and self.signal is None:
            self.signal = found
        return found > 0

    def begin(self) -> None:
        """From now on a signal lets the current step finish."""
        self._begun = True

    def fail(self, why: str) -> None:
        """Stop because something cannot be written; the first reason is kept."""
        self.failure = self.failure or why

    @contextlib.contextmanager
    def skippable(self) -> Iterator[None]:
        """A context that a second signal interrupts."""
        self._skippable = not self._of_several
        try:
            yield
        except KeyboardInterrupt:
            self.skipped = True
        finally:
            self._skippable = False

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
        if not self._begun:
            _leave(number, "stopped before training began; nothing was written.")
        self._came += 1
        if self._came > (1 if self._of_several else 2):
            _leave(number, "stopped at once; metrics.jsonl has every step that was taken.")
        self.signal = self.signal or number
        if self._came == 2 and self._skippable:
            raise KeyboardInterrupt


def _leave(number: int, why: str) -> None:
    """End the process at once: an exception may be caught, or wait for threads at exit."""
    with contextlib.suppress(Exception):  # the signal may have come in the middle of a write
        sys.stdout.flush()
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), _SHOW_CURSOR)
    with contextlib.suppress(OSError):
        os.write(2, f"\nbyte_lm: {why}\n".encode())
    os._exit(STOPPED + number)
