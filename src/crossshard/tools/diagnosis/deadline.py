"""Deadline: what may never end is run in a thread, and left there when its time is over."""

import threading
from collections.abc import Callable
from typing import Any


class LateError(Exception):
    """What was to be run has not come to an end in time; it may still go on."""


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What a function returns or raises.

    Raises:
      LateError: it has not come to an end after so many seconds.

    >>> within(60, lambda: 3)
    3
    """
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="crossshard doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise LateError
    return found[0]
