"""The variables that an optimizer updates: what they are called, and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check, _flax
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.collectives.sums import widen
from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError, VariableTypeError
from crossshard.gradients.local import check_sums, explained_types, scaled, unscale
from crossshard.gradients.mean import Mean, part_of_shard
from crossshard.gradients.status import check_gradient_dtype
from crossshard.nnx.program import Reached, bound, check_writable, same_arrays
from crossshard.nnx.slots import Named
from crossshard.pipeline.pipeline import Pipeline
from crossshard.shards.axes import Shards, check_no_further, shards_of_gradient


def trained_by_default() -> list[AnyVariable]:
    """Every ``nnx.Param`` that was given to the step."""
    around = bound()
    if around is None:
        raise ArgumentError(
            "Outside of a step of crossshard.shard there is no list of all parameters. Pass the "
            "module whose parameters to train, var_list=model."
        )
    return [variable for variable in around.held if isinstance(variable, nnx.Param)]


def named_variables(var_list: Any) -> Named:
    """The variables of a module, a variable or a list of both, with a name for each, by id.

    The variables of a module are its ``nnx.Param``s, named by their paths. A variable in a list is
    named by its metadata, else by its path in a module that was given to the step, else by its
    index: ``#0``.
    """
    items = list(var_list) if isinstance(var_list, list | tuple) else [var_list]
    found: Named = {}
    alone: list[AnyVariable] = []
    for index, item in enumerate(items):
        if isinstance(item, nnx.Variable):
            if id(item) in found:
                raise VariableError(f"{describe_variable(item)} is in var_list twice.")
            alone.append(item)
            named = [(f"#{index}", item)]
        elif isinstance(item, nnx.Pytree):
            prefix = f"{index}/" if len(items) > 1 else ""
            named = [(prefix + name, variable) for name, variable in _paths(item, nnx.Param)]
        else:
            raise VariableTypeError(
                f"var_list must be an nnx.Module or a list of nnx variables; item {index} is "
                f"{type(item).__name__} ({_check.shown(item)})."
            )
        for name, variable in named:
            dtype = getattr(variable.get_raw_value(), "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise VariableError(
                    f"{describe_variable(variable)} cannot be optimized: its dtype must be "
                    f"floating."
                )
            found[id(variable)] = (variable, name)
    if not found:
        raise ArgumentError("No variables to optimize.")
    return found | known_names(alone)


def known_names(variables: Iterable[AnyVariable]) -> Named:
    """Names of those variables that have one: their own, or a path in a module of the step."""
    found: Named = {}
    unnamed: set[int] = set()
    for variable in variables:
        own = variable.get_metadata("name", None)
        if own:
            found[id(variable)] = (variable, str(own))
        else:
            unnamed.add(id(variable))
    around = bound()
    in_roots: list[list[tuple[str, AnyVariable]]] = []
    for root in [] if around is None else around.roots:
        if unnamed and isinstance(root, nnx.Pytree):
            named = [(name, v) for name, v in _paths(root, nnx.Variable) if id(v) in unnamed]
            unnamed -= {id(variable) for _, variable in named}
            in_roots += [named] if named else []
    for index, named in enumerate(in_roots):
        prefix = f"{index}/" if len(in_roots) > 1 else ""
        found |= {id(variable): (variable, prefix + name) for name, variable in named}
    return found


def _paths(module: nnx.Pytree, kind: type[AnyVariable]) -> list[tuple[str, AnyVariable]]:
    return [
        ("/".join(map(str, path)), leaf)
        for path, leaf in nnx.iter_graph(module)
        if isinstance(leaf, kind)
    ]


def check_pairs(grads_and_vars: Any) -> list[tuple[jax.Array | None, AnyVariable]]:
    """The pairs as a list, each checked."""
    if not isinstance(grads_and_vars, Iterable) or hasattr(grads_and_vars, "dtype"):
        raise ArgumentTypeError(
            f"grads_and_vars must be a list of (gradient, variable) pairs; got "
            f"{type(grads_and_vars).__name__}."
        )
    pairs: list[tuple[jax.Array | None, AnyVariable]] = []
    for item in grads_and_vars:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ArgumentError(
                f"Each item must be a (gradient, variable) pair; got {_check.shown(item, 120)}."
            )
        _check_pair(*item)
        pairs.append((item[0], item[1]))
    if not pairs:
        raise ArgumentError("No variables provided.")
    seen: set[int] = set()
    for _, variable in pairs:
        if id(variable) in seen:
            raise VariableError(f"{describe_variable(variable)} is in grads_and_vars twice.")
        seen.add(id(variable))
    if all(gradient is None for gradient, _ in pairs):
        raise ArgumentError(
            f"No gradients provided for any variable: "
            f"{[describe_variable(variable) for _, variable in pairs]}."
        )
    return pairs


def _check_pair(gradient: Any, variable: Any) -> None:
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
    if isinstance(gradient, nnx.Variable):
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


def differentiate(
    loss: Callable[[], Any],
    variables: Sequence[AnyVariable],
    pipeline: Pipeline,
    *,
    grad_loss: Any,
    given: Any,
    loss_scale: jax.Array | None,
    shards_of_mean: Callable[[], Shards],
) -> tuple[jax.Array, list[jax.Array | None], jax.Array | None]:
    """The loss, and the local gradient of ``loss / divisor * grad_loss`` per variable.

    The divisor is the number of shards that a mean is over. A variable that the loss does not
    depend on gets ``None``. Gradients of 16-bit variables have 32 bits if they are divided. What
    the loss writes to other variables (batch statistics, counters) is kept.

    Args:
      loss: the loss.
      variables: those to differentiate with respect to.
      pipeline: what reduces the gradients.
      grad_loss: a scalar, or ``None``.
      given: modules whose variables the loss may write, besides those of the step.
      loss_scale: what the loss is multiplied by before it is differentiated, and the gradients are
        divided by.
      shards_of_mean: returns the shards over which a ``Mean`` is counted, or raises.

    Returns:
      The loss, the gradients, and whether a ``Mean`` counts no row at all; ``None`` if some always
      count.
    """
    shards = shards_of_gradient(pipeline.axis_name)
    divisor = pipeline.divisor(pipeline.shards(warn=False).size)
    around = bound()
    below = Reached([[] if around is None else around.roots, given])
    differentiated = {id(variable) for variable in variables}
    others = [v for v in below.variables if id(v) not in differentiated]
    known = differentiated | {id(other) for other in others}
    rest = [other.get_raw_value() for other in others]
    reached: set[int] = set()
    written: list[AnyVariable] = []

    def of_values(values: list[Any]) -> Any:
        marked = [_mark(value, place, reached) for place, value in enumerate(values)]
        with _flax.rebound([*variables, *others], [*marked, *rest], below.modules):
            out = _called(loss)
            after = [other.get_raw_value() for other in others]
            made = [v for v in Reached(below.roots).variables if id(v) not in known]
        empty = None
        if isinstance(out, Mean):
            out, empty = part_of_shard(out, shards_of_mean())
        value = jnp.asarray(_check.scalar(out))
        check_no_further(value, shards, values)
        changed = [not same_arrays(a, b) for a, b in zip(after, rest, strict=True)]
        written[:] = [*itertools.compress(others, changed), *made]
        kept = [*itertools.compress(after, changed), *(v.get_raw_value() for v in made)]
        divided = value if divisor == 1 or divide_after else value / divisor
        return shards.as_varying(scaled(divided, loss_scale)), (value, kept, empty)

    values = [shards.as_varying(variable.get_raw_value()) for variable in variables]
    # Divided in 16 bits, a small gradient could underflow before it is summed.
    divide_after = divisor > 1 and any(jnp.finfo(value.dtype).bits < 32 for value in values)
    jaxpr_of = jax.make_jaxpr(lambda values: of_values(values)[0])
    check_sums(lambda: jaxpr_of(values), pipeline.axis_name)
    with explained_types(shards):
        gradients, (value, kept, empty) = jax.grad(of_values, has_aux=True)(values)
    gradients = unscale(gradients, loss_scale)
    if divide_after:
        gradients = [widen(gradient) / divisor for gradient in gradients]
    for other, after in zip(written, kept, strict=True):
        if id(other) in known:
            check_writable(other)
            other.set_raw_value(after)
        else:
            _flax.bring_out(other, after)
    if grad_loss is not None:
        # grad_loss may be an int; a loss may not.
        seed = jnp.asarray(_check.scalar(grad_loss, "grad_loss", (jnp.floating, jnp.integer)))
        _check.finite("grad_loss", grad_loss)
        gradients = [gradient * seed.astype(gradient.dtype) for gradient in gradients]
    return value, [g if place in reached else None for place, g in enumerate(gradients)], empty


def _called(loss: Callable[[], Any]) -> Any:
    from flax.errors import TraceContextError

    try:
        return loss()
    except TraceContextError as error:
        raise VariableError(
            f"The loss writes to a module that was not given here ({error}). Pass the module, "
            f"var_list=model; and pass it to the step function as an argument."
        ) from error


def _mark(value: jax.Array, place: int, reached: set[int]) -> jax.Array:
    """The identity, which adds ``place`` to ``reached`` when a gradient flows back."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        # Autodiff calls this only if the loss depends on the value; else zeros stay symbolic.
        reached.add(place)
        return (gradient,)

    identity.defvjp(lambda x: (x, None), backward)
    return identity(value)
