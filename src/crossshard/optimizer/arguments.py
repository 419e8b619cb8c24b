"""Argument checks of compute_gradients, apply_gradients and minimize."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard import _check
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError, WeightUpdateError
from crossshard.gradients.nesting import inside_optimizer
from crossshard.gradients.status import check_gradient_dtype
from crossshard.jaxprs.walk import depends
from crossshard.pipeline.update.optimize import takes_keyword
from crossshard.pipeline.update.plan import WeightUpdate
from crossshard.shards.axes import Shards


def check_name(name: Any) -> str:
    """``name`` if it is a non-empty string."""
    return _check.word("name", name, hint="It is how the optimizer is found in profiles.")


def check_whole(weight_update: WeightUpdate) -> None:
    """Raise WeightUpdateError if each shard updates its slice: slots are whole."""
    if weight_update is WeightUpdate.SHARDED:
        raise WeightUpdateError(
            "weight_update='sharded' is for the Optax idiom and make_train_step: a slot has "
            "the full shape of its variable. Leave weight_update out here."
        )


def check_pairs(grads_and_vars: Any) -> list[tuple[jax.Array | None, AnyVariable]]:
    """The pairs as a list, each checked.

    Raises:
      ArgumentTypeError: not iterable, or a gradient that is not a floating array.
      ArgumentError: no pairs, no gradients, or an item that is not a pair.
      VariableError: not a variable, a duplicate, or a shape other than its gradient's.
    """
    if not isinstance(grads_and_vars, Iterable) or hasattr(grads_and_vars, "dtype"):
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
        raise ArgumentError(
            f"Each item must be a (gradient, variable) pair; got {_check.shown(item, 120)}."
        )
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
    is_array = hasattr(gradient, "dtype") or isinstance(gradient, float)
    if isinstance(gradient, nnx.Variable) or not is_array:
        raise ArgumentTypeError(f"{name} must be an array; got {type(gradient).__name__}.")
    check_gradient_dtype(name, gradient)
    _check.array(name, gradient)
    if not jnp.issubdtype(jnp.result_type(gradient), jnp.floating):
        raise ArgumentTypeError(
            f"{name} has dtype {jnp.result_type(gradient)}, not a floating one."
        )
    # Inside a step, a per-shard variable holds one shard's value.
    if jnp.shape(gradient) != jnp.shape(variable.get_raw_value()):
        raise VariableError(f"{name} has shape {jnp.shape(gradient)}.")


def check_global_step(global_step: Any) -> None:
    """Raise ArgumentTypeError unless it is ``None`` or a scalar integer variable."""
    if global_step is None:
        return
    variable = isinstance(global_step, nnx.Variable)
    value = global_step.get_raw_value() if variable else None
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    got = describe_variable(global_step) if variable else _check.shown(global_step)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or shape != ():
        raise ArgumentTypeError(
            f"global_step must be a scalar integer variable, because it is incremented in place; "
            f"got {got}. Write nnx.Variable(jnp.array(0))."
        )


def check_loss(loss: Any) -> Callable[[], Any]:
    """``loss`` if it is callable, else an error that shows how to write one."""
    if not callable(loss):
        raise ArgumentTypeError(
            f"A loss must be a function without arguments, because a computed value cannot be "
            f"differentiated; got {type(loss).__name__}. Write lambda: loss_fn(model, x)."
        )
    return loss


def check_gates(gate_gradients: Any) -> None:
    """Check an argument that TensorFlow accepts and that has no effect under XLA."""
    # A bool is none, and to compare with an array gives another one.
    if type(gate_gradients) is not int or gate_gradients not in (0, 1, 2):
        raise ArgumentError(
            f"gate_gradients must be one of CrossShardOptimizer.GATE_NONE (0), GATE_OP (1) and "
            f"GATE_GRAPH (2); got {_check.shown(gate_gradients)}."
        )


def check_functions(given: Mapping[str, Any], params: Any, shards: Shards) -> None:
    """Raise for a function that the inner optimizer would call on this shard's rows alone.

    Raises:
      ArgumentError: such a function, unless its type says that it reduces its value itself.
    """
    for name, function in given.items():
        if shards.number == 1 or not callable(function) or _reduces(function, params, shards):
            continue
        raise ArgumentError(
            f"{name} is a function, which the inner optimizer calls after the gradients have been "
            f"reduced: on each shard it would see that shard's rows alone, and shards would take "
            f"different steps. Take the step on global arrays instead, under jax.jit and without "
            f"shard_map: there is nothing to reduce then, and the function sees all rows."
        )


def _reduces(function: Callable[..., Any], params: Any, shards: Shards) -> bool:
    """Whether a function of the parameters is a loss that is, by its type, equal on all shards."""
    if not shards.has_vma:
        return False

    def look(params: Any) -> None:
        (value,) = jax.tree.leaves(function(params))
        found.append(jnp.shape(value) == () and not shards.is_varying(value))

    found: list[bool] = []
    with contextlib.suppress(Exception):  # a function of other arguments, or of no single value
        jax.eval_shape(look, params)
    return found == [True]


def check_keywords(
    transformations: Sequence[optax.GradientTransformation],
    params: Any,
    given: Mapping[str, Any],
    *,
    a_stage_may_read: bool,
) -> None:
    """Raise for a keyword that no transformation reads, such as a misspelt one of ours.

    Raises:
      ArgumentTypeError: such a keyword.
    """
    # Optax's names for the loss and its gradient: optimizers that do not use them ignore them.
    for name in sorted(given.keys() - {"value", "grad"}):
        if a_stage_may_read or reads(transformations, params, name, given) is not False:
            continue
        raise ArgumentTypeError(
            f"apply_gradients was given {name!r}, which neither it nor the inner optimizer takes. "
            f"Pass hyperparameters, such as a learning rate, when you create the optimizer, or "
            f"keep them in its state with optax.inject_hyperparams."
        )


def reads(
    transformations: Sequence[optax.GradientTransformation],
    params: Any,
    name: str,
    given: Mapping[str, Any],
) -> bool | None:
    """Whether an update depends on a keyword; ``None`` if one cannot be traced alone."""
    found: list[bool | None] = []
    for transformation in transformations:

        def update(value: Any, params: Any, gradients: Any, run: Any = transformation) -> Any:
            with inside_optimizer():
                return run.update(gradients, run.init(params), params, **{**given, name: value})

        try:
            takes = takes_keyword(transformation, name)
            found.append(takes and depends(update, given[name], params, params))
        except Exception:  # with a function as the value, for example: the step itself will tell
            found.append(None)
    return None if None in found and True not in found else any(found)
