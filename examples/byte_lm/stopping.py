"""Ctrl-C as a wish to stop after the current step; a second one insists."""

import signal
from types import FrameType, TracebackType
from typing import Self


class Stopping:
    """While entered, the first SIGINT is remembered, and the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Whether the user has asked to stop."""
        return self.asked

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
