"""Aborts: JAX's runtime ends a process whose coordinator is gone; this says a word before it."""

import ctypes
import signal
from collections.abc import Callable
from typing import Any

# Python calls its own handlers between two instructions only, and an abort does not wait for one.
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[Any] = []


def before_abort(function: Callable[[], None]) -> None:
    """Call a function when the process is about to abort; if it returns, the process aborts."""

    @_Handler
    def handler(number: int) -> None:
        function()

    _kept.append(handler)
    _set(ctypes.cast(handler, ctypes.c_void_p))


def as_usual_on_abort() -> None:
    """Take it back, as when Python ends and runs no more functions."""
    _set(ctypes.c_void_p(signal.SIG_DFL))


def _set(handler: ctypes.c_void_p) -> None:
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal(signal.SIGABRT, handler)
