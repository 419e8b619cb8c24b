"""Flax NNX, imported on first use, and all private API of it; no other file uses any."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import jax.extend

from crossshard import _jax

if TYPE_CHECKING:
    from flax import nnx as nnx
    from flax.nnx.tracers import TraceState

    # A variable with a value of any type.
    AnyVariable: TypeAlias = nnx.Variable[Any]
else:

    class _None:
        """Stands for every class of Flax until it is loaded: nothing is an instance of it."""

    class _Nnx:
        """Stands for ``flax.nnx``, whose import takes longer than that of this package."""

        def __getattr__(self, name: str) -> Any:
            if name[0].isupper() and not is_loaded():
                return _None
            value = getattr(load(), name)
            setattr(self, name, value)
            return value

    nnx = _Nnx()
    AnyVariable = "nnx.Variable"

_registrations: list[Callable[[], object]] = []


def is_loaded() -> bool:
    """Return whether Flax NNX is loaded; until it is, there are no variables."""
    return "flax.nnx" in sys.modules


def when_loaded(register: Callable[[], object]) -> None:
    """Call ``register``, which makes a class known to Flax, once Flax is loaded."""
    _registrations.append(register)
    if is_loaded():
        load()


def load() -> Any:
    """Import ``flax.nnx``, and register the classes of this package with it."""
    from flax import nnx

    while _registrations:
        _registrations.pop()()
    return nnx


def current_trace() -> Any:
    """Return the current trace, comparable with ``==``."""
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


def describe_variable(variable: AnyVariable) -> str:
    """Describe a variable, as ``Param float32[3,4]``, with its name if it has one."""
    value = variable.get_raw_value()
    name = variable.get_metadata("name", None)
    kind = type(variable).__name__ + (f" {name!r}" if name else "")
    if not hasattr(value, "dtype"):
        return f"{kind} ({type(value).__name__})"
    return f"{kind} {value.dtype}[{','.join(map(str, value.shape))}]"


@contextmanager
def rebound(
    variables: Sequence[AnyVariable], values: Sequence[Any], modules: Sequence[nnx.Pytree] = ()
) -> Iterator[None]:
    """Temporarily bind variables to values of the current trace.

    The modules are moved to that trace too, so that ``nnx.grad`` and the like accept them. Their
    attributes are restored afterwards, so that no tracer stays in them.
    """
    from flax.nnx.tracers import TraceState

    before = [(variable.get_raw_value(), variable._trace_state) for variable in variables]
    of_modules = [(module._pytree__state._trace_state, {**vars(module)}) for module in modules]
    trace = TraceState()
    try:
        for variable, value in zip(variables, values, strict=True):
            _set(variable, value, trace)
        for module in modules:
            module._pytree__state._trace_state = trace
        yield
    finally:
        for variable, state in zip(variables, before, strict=True):
            _set(variable, *state)
        for module, (trace, attributes) in zip(modules, of_modules, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
            # Only now: nnx.grad and the like put another ``_pytree__state`` into the attributes.
            module._pytree__state._trace_state = trace


def _set(variable: AnyVariable, value: Any, trace: TraceState) -> None:
    # NNX allows writes only in a variable's own trace, so this bypasses its check.
    object.__setattr__(variable, "_raw_value", value)
    object.__setattr__(variable, "_trace_state", trace)


# The slot in which NNX keeps the value of a variable.
_VALUE_SLOT = "_raw_value"
_thread = threading.local()
_lock = threading.Lock()
_number_of_watchers = 0


class _WatchedSlot:
    """NNX's slot, which tells this thread's watcher of reads that a trace makes constants."""

    def __init__(self, slot: Any):
        self.slot = slot

    def __get__(self, variable: Any, owner: Any = None) -> Any:
        if variable is None:
            return self
        watcher = getattr(_thread, "watcher", None)
        if watcher is not None:
            report, outer = watcher
            if variable._trace_state.jax_trace == outer and not variable._can_update:
                _thread.watcher = None  # report may read the variable
                try:
                    report(variable)
                finally:  # a step that catches the error is watched as before
                    _thread.watcher = watcher
        return self.slot.__get__(variable, owner)

    def __set__(self, variable: Any, value: Any) -> None:
        self.slot.__set__(variable, value)


@contextmanager
def watching_reads(report: Callable[[AnyVariable], None]) -> Iterator[None]:
    """Call ``report``, which raises, if a trace reads a variable from outside of all traces.

    JAX would compile its current value into the program.
    """
    global _number_of_watchers
    if not is_loaded():
        yield
        return
    with _jax.outside_of_traces():
        outer = current_trace()
    before = getattr(_thread, "watcher", None)
    with _lock:
        _number_of_watchers += 1
        if _number_of_watchers == 1:
            slot = _WatchedSlot(getattr(nnx.Variable, _VALUE_SLOT))
            setattr(nnx.Variable, _VALUE_SLOT, slot)
    _thread.watcher = report, outer
    try:
        yield
    finally:
        _thread.watcher = before
        with _lock:
            _number_of_watchers -= 1
            if not _number_of_watchers:
                setattr(nnx.Variable, _VALUE_SLOT, vars(nnx.Variable)[_VALUE_SLOT].slot)
