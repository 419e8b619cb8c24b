"""Variables as the inputs and outputs of a traced function: bound to its values, then restored."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx
from flax.nnx.tracers import TraceState

from crossshard.errors import VariableError
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import containers_in, modules_in

_thread = threading.local()


@contextmanager
def rebound(
    variables: Sequence[nnx.Variable], values: Sequence[Any], modules: Sequence[nnx.Pytree] = ()
) -> Iterator[None]:
    """Let the variables hold other values, of the trace in force, and restore them after.

    The modules belong to that trace too, so that ``nnx.grad`` and its like can take them.
    """
    before = [(v.get_raw_value(), v._trace_state) for v in variables]
    states = [(m._pytree__state, m._pytree__state._trace_state) for m in modules]
    trace = TraceState()
    try:
        for variable, value in zip(variables, values, strict=True):
            _rebind(variable, value, trace)
        for state, _ in states:
            state._trace_state = trace
        yield
    finally:
        for variable, (value, outer) in zip(variables, before, strict=True):
            _rebind(variable, value, outer)
        for state, outer in states:
            state._trace_state = outer


def _rebind(variable: nnx.Variable, value: Any, trace: TraceState) -> None:
    # NNX lets nobody but the owner of a trace write a variable; the one who hands it in is that.
    object.__setattr__(variable, "_raw_value", value)
    object.__setattr__(variable, "_trace_state", trace)


@contextmanager
def kept_attributes(modules: Sequence[nnx.Pytree]) -> Iterator[None]:
    """Give the modules back the attributes that they had: a trace's own would outlive it."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)


def bring_out(variable: nnx.Variable, value: Any) -> None:
    """Write to a variable, which may have been made in a trace that has ended, in this one."""
    _rebind(variable, value, TraceState())


class Bound:
    """What a runner binds while it traces its step.

    Attributes:
      variables: the variables that hold values of this trace.
      modules: the modules that belong to it.
      containers: the optimizers that it reaches.
    """

    def __init__(self, variables: Sequence[nnx.Variable], roots: Sequence[Any]):
        self.variables = list(variables)
        self.modules = modules_in(roots)
        self.containers = containers_in(roots)

    def __contains__(self, variable: nnx.Variable) -> bool:
        return any(variable is known for known in self.variables)


class RetraceNeeded(BaseException):
    """Raised inside a step by an optimizer whose variables must be made outside of it.

    It is not an ``Exception``, so that a step's own handlers let it through to the runner, which
    calls ``make`` and traces the step again.
    """

    def __init__(self, make: Callable[[], None]):
        super().__init__()
        self.make = make


@contextmanager
def binding(bound: Bound) -> Iterator[None]:
    """Let the code inside see what the runner around it binds."""
    _thread.bound = bound
    try:
        yield
    finally:
        _thread.bound = None


def bound() -> Bound | None:
    """What the runner around this line binds; ``None`` outside of any."""
    return getattr(_thread, "bound", None)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two values are made of the very same arrays, not merely of equal ones."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def current_trace() -> TraceState:
    """The trace in force; equal to another of itself alone."""
    return TraceState()


def check_writable(variable: nnx.Variable) -> None:
    """Raise unless a value of the trace in force may be written to the variable."""
    if not variable._can_update:
        raise VariableError(
            f"{describe_variable(variable)} was made outside of the step that writes it and was "
            f"not handed to it. Pass its module to the step function as an argument, and run that "
            f"with crossshard.shard."
        )
