"""Argument checks of compute_gradients, apply_gradients and minimize."""

import difflib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError
from crossshard.gradients.incoming import check_gradient_dtype
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import package


def check_name(name: Any) -> str:
    """``name`` if it is a non-empty string."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a string; got {name!r} ({type(name).__name__}).")
    if not name:
        raise ArgumentError("name must not be empty: it is how the optimizer is found in profiles.")
    return name


def check_pairs(grads_and_vars: Any) -> list[tuple[jax.Array | None, nnx.Variable]]:
    """The pairs as a list, each checked.

    Raises:
      ArgumentTypeError: not iterable, or a gradient that is not a floating array.
      ArgumentError: no pairs, no gradients, or an item that is not a pair.
      VariableError: not a variable, a duplicate, or a shape other than its gradient's.
    """
    if not isinstance(grads_and_vars, Iterable):
        raise ArgumentTypeError(
            f"grads_and_vars must be a list of (gradient, variable) pairs; got "
            f"{type(grads_and_vars).__name__}."
        )
    items = list(grads_and_vars)
    if not items:
        raise ArgumentError("No variables provided.")
    for item in items:
        _check_pair(item)
    seen: set[int] = set()
    for _, variable in items:
        if id(variable) in seen:
            raise VariableError(f"{describe_variable(variable)} is in grads_and_vars twice.")
        seen.add(id(variable))
    if all(gradient is None for gradient, _ in items):
        raise ArgumentError(
            f"No gradients provided for any variable: "
            f"{[describe_variable(variable) for _, variable in items]}."
        )
    return [(gradient, variable) for gradient, variable in items]


def _check_pair(item: Any) -> None:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ArgumentError(f"Each item must be a (gradient, variable) pair; got {item!r:.120}.")
    gradient, variable = item
    if not isinstance(variable, nnx.Variable):
        swapped = (
            " Gradient and variable are swapped." if isinstance(gradient, nnx.Variable) else ""
        )
        raise VariableError(
            f"Each pair must end with an nnx variable; got {type(variable).__name__}.{swapped}"
        )
    if gradient is None:
        return
    name = f"The gradient of {describe_variable(variable)}"
    if isinstance(gradient, nnx.Variable | str) or not _arraylike(gradient):
        raise ArgumentTypeError(f"{name} must be an array; got {type(gradient).__name__}.")
    check_gradient_dtype(name, gradient)
    if not jnp.issubdtype(jnp.result_type(gradient), jnp.floating):
        raise ArgumentTypeError(
            f"{name} has dtype {jnp.result_type(gradient)}, not a floating one."
        )
    # Inside a step, a per-shard variable holds one shard's value.
    if jnp.shape(gradient) != jnp.shape(variable.get_raw_value()):
        raise VariableError(f"{name} has shape {jnp.shape(gradient)}.")


def _arraylike(gradient: Any) -> bool:
    return hasattr(gradient, "dtype") or isinstance(gradient, float)


def check_global_step(global_step: Any) -> None:
    """Raise ArgumentTypeError unless it is ``None`` or a scalar integer variable."""
    if global_step is None:
        return
    variable = isinstance(global_step, nnx.Variable)
    value = global_step.get_raw_value() if variable else None
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or shape != ():
        raise ArgumentTypeError(
            f"global_step must be a scalar integer variable, because it is incremented in place; "
            f"got {describe_variable(global_step) if variable else repr(global_step)}. Write "
            f"nnx.Variable(jnp.array(0))."
        )


def check_gates(gate_gradients: Any, aggregation_method: Any, colocate: Any) -> None:
    """Check arguments that TensorFlow accepts and that have no effect under XLA."""
    whole = isinstance(gate_gradients, int) and not isinstance(gate_gradients, bool)
    if not whole or gate_gradients not in (0, 1, 2):
        raise ArgumentError(
            f"gate_gradients must be one of Optimizer.GATE_NONE (0), GATE_OP (1) and GATE_GRAPH "
            f"(2); got {gate_gradients!r}."
        )
    if aggregation_method is not None and not isinstance(aggregation_method, int):
        raise ArgumentTypeError(
            f"aggregation_method must be None or an int; got {aggregation_method!r}."
        )
    if not isinstance(colocate, bool):
        raise ArgumentTypeError(f"colocate_gradients_with_ops must be a bool; got {colocate!r}.")


def check_keywords(given: Iterable[str], ours: Sequence[str], functions: Sequence[Any]) -> None:
    """Raise unless every keyword is one of ours, or one that an optimizer's functions may take.

    A chain passes every keyword to all of its parts, so the functions of all parts are checked.

    Raises:
      ArgumentTypeError: a keyword that none of them takes.
    """
    for name in given:
        if name in _FOR_ANY_OPTIMIZER or any(may_take(function, name) for function in functions):
            continue
        known = ["grads_and_vars", "global_step", "name", *ours]
        close = difflib.get_close_matches(name, known, 1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ArgumentTypeError(
            f"apply_gradients was given {name!r}, which neither it nor the inner optimizer "
            f"takes.{meant} Pass hyperparameters, such as a learning rate, when you create the "
            f"optimizer, or keep them in its state with optax.inject_hyperparams."
        )


# Optax's names for the loss and its gradient: optimizers that do not use them ignore them.
_FOR_ANY_OPTIMIZER = ("value", "grad")


def may_take(function: Any, name: str) -> bool:
    """Whether a function of an optimizer may take a keyword."""
    of_optax = package(function) == "optax"
    if of_optax and "<locals>" not in function.__qualname__ and "." not in function.__qualname__:
        return False  # a factory of optimizers, not part of one
    code = function.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    takes_any = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return name in named or name in code.co_consts or (takes_any and not of_optax)
