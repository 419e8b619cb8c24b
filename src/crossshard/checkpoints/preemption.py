"""Preemption: SIGTERM asks a loop to stop, and all processes of a job to stop at one step."""

import itertools
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import jax

from crossshard import _jax
from crossshard.errors import CheckpointError

# How often a process looks whether another one was asked to stop, and how long it waits for the
# others.
_LOOK, _PATIENCE = 0.5, 120.0
_numbers = itertools.count()


class Preemption:
    """Remembers ``SIGTERM`` until it is closed; a second one does what the first would have done.

    Raises:
      CheckpointError: it is not made in the main thread, which alone gets signals.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "save_if_preempted must be called in the main thread, which alone gets SIGTERM."
            )
        self._asked = threading.Event()
        self._closed = threading.Event()
        self._before: Any = signal.signal(signal.SIGTERM, self._remember)
        self._calls, self._stop_at, self._lock = 0, 0, threading.Lock()
        self._key = f"crossshard/preemption/{next(_numbers)}"
        self._together = jax.process_count() > 1 and _jax.has_coordinator()
        if self._together:
            threading.Thread(target=self._agree, name="crossshard", daemon=True).start()

    def reached(self) -> bool:
        """Return whether to stop now, the same in all processes, which call it after each step."""
        if not self._together:
            return self._asked.is_set()
        with self._lock:
            self._calls += 1
            return bool(self._stop_at) and self._calls >= self._stop_at

    def close(self) -> None:
        """Restore the handler of the signal."""
        self._closed.set()
        if signal.getsignal(signal.SIGTERM) == self._remember:
            signal.signal(signal.SIGTERM, self._before)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._asked.is_set() and not callable(self._before):
            signal.signal(number, self._before or signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._asked.set()
        if callable(self._before):
            self._before(number, frame)

    def _agree(self) -> None:
        """Wait until any process has a signal, and agree on the first call that none has made."""
        while not self._closed.wait(_LOOK):
            told = _jax.kv_get_dir(f"{self._key}/")
            if not (self._asked.is_set() or told):
                continue
            # No process takes another step until all have told how many they have taken.
            with self._lock:
                _jax.kv_overwrite(f"{self._key}/{jax.process_index()}", str(self._calls))
                end = time.monotonic() + _PATIENCE
                while len(told) < jax.process_count() and time.monotonic() < end:
                    time.sleep(0.02)
                    told = _jax.kv_get_dir(f"{self._key}/")
                self._stop_at = 1 + max(map(int, told.values()))
            return
