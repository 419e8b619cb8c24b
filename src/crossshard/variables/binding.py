"""Binds variables to the inputs and outputs of a traced function."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from crossshard import _flax
from crossshard.errors import VariableError
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import Reached, modules_in

_thread = threading.local()


@contextmanager
def rebound(
    variables: Sequence[nnx.Variable], values: Sequence[Any], modules: Sequence[nnx.Pytree] = ()
) -> Iterator[None]:
    """Temporarily bind variables to values of the current trace.

    The modules are moved to that trace too, so that ``nnx.grad`` and the like accept them.
    """
    before = [_flax.variable_state(variable) for variable in variables]
    module_traces = [_flax.module_trace(module) for module in modules]
    trace = _flax.current_trace()
    try:
        for variable, value in zip(variables, values, strict=True):
            _flax.set_variable_state(variable, value, trace)
        for module in modules:
            _flax.set_module_trace(module, trace)
        yield
    finally:
        for variable, state in zip(variables, before, strict=True):
            _flax.set_variable_state(variable, *state)
        for module, module_trace in zip(modules, module_traces, strict=True):
            _flax.set_module_trace(module, module_trace)


@contextmanager
def kept_attributes(modules: Sequence[nnx.Pytree]) -> Iterator[None]:
    """Restore the attributes of modules afterwards, so that no tracer stays in them."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)


def bring_out(variable: nnx.Variable, value: Any) -> None:
    """Write to a variable that may have been created in a trace that has ended."""
    _flax.set_variable_state(variable, value, _flax.current_trace())


class Bound:
    """The objects that a runner binds while it traces its step.

    Attributes:
      variables: the variables.
      modules: the modules.
      containers: the optimizers.
      roots: the objects that contain all of these.
    """

    def __init__(self, variables: Sequence[nnx.Variable], reached: Reached):
        self.variables = list(variables)
        self.roots = reached.roots
        self.modules = modules_in(reached.roots)
        self.containers = reached.containers

    def __contains__(self, variable: nnx.Variable) -> bool:
        return any(variable is known for known in self.variables)


class RetraceNeeded(BaseException):
    """Raised in a step by an optimizer that needs new variables from outside the trace.

    The runner calls ``make`` and traces the step again. It is not an ``Exception``, so that
    handlers in the step do not catch it.
    """

    def __init__(self, make: Callable[[], None]):
        super().__init__()
        self.make = make


@contextmanager
def binding(bound: Bound) -> Iterator[None]:
    """Set the current bindings."""
    _thread.bound = bound
    try:
        yield
    finally:
        _thread.bound = None
        for container in bound.containers:
            container.forget_trace()


def bound() -> Bound | None:
    """The current bindings; ``None`` outside of a runner."""
    return getattr(_thread, "bound", None)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two values consist of identical array objects."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def check_writable(variable: nnx.Variable) -> None:
    """Raise unless the variable can be written in the current trace."""
    if _flax.is_writable(variable):
        return
    around = bound()
    if around is not None and variable in around:
        raise VariableError(
            f"{describe_variable(variable)} belongs to the step, and would be written inside of "
            f"jax.lax.cond, jax.lax.scan, jax.jit or the like, which do not support NNX. Use "
            f"nnx.cond, nnx.scan, nnx.fori_loop or nnx.jit, and pass them the module and the "
            f"optimizer as arguments."
        )
    raise VariableError(
        f"{describe_variable(variable)} was created outside of the step that writes it and was "
        f"not passed to it. Pass its module to the step function as an argument, and run the "
        f"step with crossshard.shard."
    )


def check_followed(variable: nnx.Variable) -> None:
    """Raise if a variable that an optimizer reads would be a constant of the current trace."""
    held = jax.tree.leaves(variable.get_raw_value())
    if _flax.is_writable(variable) or any(isinstance(leaf, jax.core.Tracer) for leaf in held):
        return
    raise VariableError(
        f"The optimizer reads {describe_variable(variable)}, which it closes over: code that is "
        f"compiled here would keep its current value. Run the step with crossshard.shard, which "
        f"passes it in; or keep it in the optimizer's state, with optax.inject_hyperparams."
    )
