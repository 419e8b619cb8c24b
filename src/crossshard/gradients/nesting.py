"""What an inner optimizer may not do: reduce again, or read variables from outside of a trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crossshard import _flax, _jax
from crossshard._flax import AnyVariable, describe_variable
from crossshard.errors import NestedReductionError, VariableError

_thread = threading.local()


@contextmanager
def inside_optimizer() -> Iterator[None]:
    """Mark the code inside as part of an inner optimizer."""
    outer = getattr(_thread, "inside", False)
    _thread.inside = True
    try:
        with watching_constants(_refuse_variable):
            yield
    finally:
        _thread.inside = outer


def refuse_nesting() -> None:
    """Raise NestedReductionError inside of an inner optimizer."""
    if getattr(_thread, "inside", False):
        raise NestedReductionError(
            "A CrossShardOptimizer was updated inside another one's update: the gradients would be "
            "reduced twice. Keep the outer one and take the inner one's .inner."
        )


@contextmanager
def watching_constants(on_read: Callable[[AnyVariable], None]) -> Iterator[None]:
    """Call ``on_read``, which should raise, if a trace reads a variable from outside of traces."""
    if not _flax.is_loaded():
        yield
        return
    with _jax.outside_of_traces():
        outermost = _flax.current_trace()
    with _flax.watching_reads(on_read, outermost):
        yield


def _refuse_variable(variable: AnyVariable) -> None:
    raise VariableError(
        f"The optimizer reads {describe_variable(variable)}, which it closes over: a compiled step "
        f"would keep its current value. Pass it to a step of crossshard.shard as an argument; or "
        f"let a schedule read the count that Optax passes to it, or keep values that change in the "
        f"optimizer's state, with optax.inject_hyperparams."
    )
