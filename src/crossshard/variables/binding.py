"""Variables as the inputs and outputs of a traced function: bound to its values, then restored."""

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
    """Let the variables hold other values, of the trace in force, and restore them after.

    The modules belong to that trace too, so that ``nnx.grad`` and its like can take them.
    """
    before = [_flax.variable_state(variable) for variable in variables]
    outer = [_flax.module_trace(module) for module in modules]
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
        for module, its in zip(modules, outer, strict=True):
            _flax.set_module_trace(module, its)


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
    _flax.set_variable_state(variable, value, _flax.current_trace())


class Bound:
    """What a runner binds while it traces its step.

    Attributes:
      variables: the variables that hold values of this trace.
      modules: the modules that belong to it.
      containers: the optimizers that it reaches.
      roots: what all of these were found in.
    """

    def __init__(self, variables: Sequence[nnx.Variable], reached: Reached):
        self.variables = list(variables)
        self.roots = reached.roots
        self.modules = modules_in(reached.roots)
        self.containers = reached.containers

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
        for container in bound.containers:
            container.forget_trace()


def bound() -> Bound | None:
    """What the runner around this line binds; ``None`` outside of any."""
    return getattr(_thread, "bound", None)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two values are made of the very same arrays, not merely of equal ones."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def check_writable(variable: nnx.Variable) -> None:
    """Raise unless a value of the trace in force may be written to the variable."""
    if _flax.is_writable(variable):
        return
    around = bound()
    if around is not None and variable in around:
        raise VariableError(
            f"{describe_variable(variable)} belongs to the step, and would be written inside of "
            f"jax.lax.cond, jax.lax.scan, jax.jit or the like, which NNX cannot see into. Use "
            f"nnx.cond, nnx.scan, nnx.fori_loop or nnx.jit, and give them the module and the "
            f"optimizer as arguments."
        )
    raise VariableError(
        f"{describe_variable(variable)} was made outside of the step that writes it and was "
        f"not handed to it. Pass its module to the step function as an argument, and run that "
        f"with crossshard.shard."
    )


def check_followed(variable: nnx.Variable) -> None:
    """Raise if the trace in force would take a variable that an optimizer reads for a constant."""
    held = jax.tree.leaves(variable.get_raw_value())
    if _flax.is_writable(variable) or any(isinstance(leaf, jax.core.Tracer) for leaf in held):
        return
    raise VariableError(
        f"The optimizer reads {describe_variable(variable)}, which it closes over: what is "
        f"compiled here would go on with the value that it has now. Run the step with "
        f"crossshard.shard, which hands it in; or keep it in the optimizer's state, with "
        f"optax.inject_hyperparams."
    )
