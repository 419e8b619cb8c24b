"""Prefetch: reads batches in a thread, and puts them on the devices while a step runs."""

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from crossshard import _check
from crossshard._annotations import Json, PyTree
from crossshard.errors import ArgumentTypeError
from crossshard.step.batches import check_batches

# For how many seconds the end of a loop waits for a loader that is in the middle of a batch.
_PATIENCE = 2.0
# The iterators that are read ahead, by their ids.
_AHEAD: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def is_read_ahead(iterator: Any) -> bool:
    """Return whether the state of an iterator may be that of a batch which no loop has taken."""
    return _AHEAD.get(id(iterator)) is iterator


class Prefetch(Iterator[PyTree]):
    """The batches of an iterable, in their order, read ahead by a thread; see ``TrainStep``.

    The thread ends with the loop, however that ends. Another loop goes on with the next batch.
    """

    def __init__(self, batches: Iterable[PyTree], size: int, place: Callable[[PyTree], PyTree]):
        check_batches(batches)
        self._size = _check.whole_number("size", size, most=None)
        # Here, since what starts processes may want the main thread.
        self._source, self._place = iter(batches), place
        # A generator has no state, and some iterators no weak references.
        with contextlib.suppress(TypeError):
            _AHEAD[id(self._source)] = self._source
        # What was read and not taken: a batch and the state of the source after it, or an error.
        self._ready, self._wanted = _queue(), _queue()
        self._thread: threading.Thread | None = None
        # Ends the thread; also when nothing refers to this any longer, and at exit.
        self._end: weakref.finalize[..., Any] | None = None
        self._state: Any = None

    def __iter__(self) -> Iterator[PyTree]:
        try:
            while True:
                try:
                    yield next(self)
                except StopIteration:
                    return
        finally:
            self._stop()

    def __next__(self) -> PyTree:
        if self._end is None:
            self._start()
        batch, state, error = self._ready.get()
        if error is not None:
            self._stop()
            try:
                raise error
            finally:
                # Its traceback has this frame.
                del error
        self._wanted.put(True)
        self._state = state
        return batch

    def get_state(self) -> Json | bytes:
        """Return the state of the iterable after the last batch that was taken, not read ahead.

        Raises:
          ArgumentTypeError: it has no ``get_state`` and ``set_state``.
        """
        source = self._stateful()
        # The source itself may be ahead, or has failed in a batch.
        return _state_of(source) if self._thread is None else copy.deepcopy(self._state)

    def set_state(self, state: Json | bytes) -> None:
        """Go on after the batch at which ``get_state`` returned this state; raise as it does."""
        source = self._stateful()
        self._stop()
        self._join()
        self._ready, self._thread = _queue(), None
        source.set_state(copy.deepcopy(state))

    def _stateful(self) -> Any:
        if all(hasattr(self._source, each) for each in ("get_state", "set_state")):
            return self._source
        raise ArgumentTypeError(
            f"The batches come from {_check.described(self._source)}, which has no get_state and "
            f"set_state, as Grain's iterators have. Save where they stand as JSON, such as "
            f"data={{'batch': 3}}, and begin at that batch."
        )

    def _start(self) -> None:
        self._join()
        if self._ready.empty():
            self._state = _state_of(self._source)
        self._wanted, stopped = _queue(), threading.Event()
        for _ in range(self._size - self._ready.qsize()):
            self._wanted.put(True)
        # A thread has JAX's settings of its own, and this one decides on the dtypes of batches.
        x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        given = self._source, self._place, x64, self._wanted, self._ready, stopped
        self._thread = threading.Thread(target=_read, args=given, name="crossshard", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._thread, self._wanted, stopped)

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None

    def _join(self) -> None:
        # What it is about to read comes next.
        if self._thread is not None:
            self._thread.join()


def _queue() -> Any:
    # Not loaded by every program.
    from queue import SimpleQueue

    return SimpleQueue()


def _read(
    source: Any, place: Any, x64: bool, wanted: Any, ready: Any, stopped: threading.Event
) -> None:
    """Read as many batches as are wanted, until an error or the end, which is one."""
    with jax.enable_x64(x64):
        while wanted.get() and not stopped.is_set():
            try:
                batch = next(source)
                ready.put((place(batch), _state_of(source), None))
                del batch
            except BaseException as error:
                ready.put((None, None, error))
                return


def _state_of(source: Any) -> Any:
    """Return a copy of the state of an iterator, which may change it as it goes on."""
    return copy.deepcopy(source.get_state()) if hasattr(source, "get_state") else None


def _end(thread: threading.Thread, wanted: Any, stopped: threading.Event) -> None:
    stopped.set()
    wanted.put(False)
    # A cycle of references may end in the thread itself.
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)
