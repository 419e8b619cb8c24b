"""Resolves an optimizer's name from the command line, and tests it."""

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from crossshard.errors import ArgumentError

# The names of the learning rate in factories.
_LEARNING_RATES = ("learning_rate", "max_learning_rate", "lr", "step_size")

# Defaults for optimizers without one: the best of a grid with factor 4, after 150 steps of a
# small model of this kind.
_SUITABLE = {
    "acprop": 1e-3, "adadelta": 2.0, "adafactor": 0.02, "adagrad": 0.1, "fromage": 0.02,
    "galore": 4e-3, "lamb": 0.02, "lars": 2.0, "lion": 1e-3, "muon": 0.03, "noisy_sgd": 0.3,
    "novograd": 0.02, "optimistic_gradient_descent": 0.15, "radam": 4e-3, "rprop": 3e-4,
    "sgd": 0.3, "sign_sgd": 1e-3, "signum": 1e-3, "simplified_ademamix": 5e-4, "sm3": 0.03,
}  # fmt: skip
_OTHERWISE = 2e-3

_LINE_SEARCH = "its line search evaluates the loss at further points within a step"
_PER_EXAMPLE = "it needs per-example gradients, and shards compute those of their batch"
_HESSIAN = "it estimates the Hessian from the loss function itself"
_BEYOND_GRADIENTS = {
    "lbfgs": _LINE_SEARCH,
    "scale_by_backtracking_linesearch": _LINE_SEARCH,
    "scale_by_zoom_linesearch": _LINE_SEARCH,
    "dpsgd": _PER_EXAMPLE,
    "differentially_private_aggregate": _PER_EXAMPLE,
    "hutchinson_estimator_diag_hessian": _HESSIAN,
    "sophia": _HESSIAN,
}


@dataclasses.dataclass(frozen=True)
class InnerOptimizer:
    """An Optax transformation with its name.

    Attributes:
      name: the name as given.
      transformation: the transformation.
      learning_rate: what it was given or sets itself; ``None`` if it knows none.
    """

    name: str
    transformation: optax.GradientTransformation
    learning_rate: float | None


def make_optimizer(name: str, learning_rate: float | None) -> InnerOptimizer:
    """The optimizer of this name, with this or a default learning rate.

    Args:
      name: a name in ``optax`` or ``optax.contrib``, or ``package.module:factory``.
      learning_rate: goes to the parameter that the factory has for it.

    Raises:
      ArgumentError: there is none of this name; it needs more than gradients, or arguments that
        cannot be given here; it is a building block that does not lead downhill.
    """
    factory = _imported(name) if ":" in name else _of_optax(name)
    taken, rate = _with_learning_rate(factory, name, learning_rate)
    _check_nothing_missing(factory, name, taken)
    try:
        made = factory(**taken)
    except Exception as error:  # a factory of the user's may raise anything
        raise ArgumentError(f"{name} could not be created: {_first_line(error)}.") from None
    if not callable(getattr(made, "init", None)) or not callable(getattr(made, "update", None)):
        raise ArgumentError(
            f"{name} is not an optimizer: it returns {type(made).__name__}, and not an Optax "
            f"transformation."
        )
    _check_downhill(made, name)
    return InnerOptimizer(name, made, rate)


def check_fits(inner: InnerOptimizer, model: nnx.Module) -> None:
    """Trace a step on the parameters of a model, to find failures before the run.

    Raises:
      ArgumentError: the optimizer fails on parameters of these names and shapes.
    """
    transformation = optax.with_extra_args_support(inner.transformation)

    def step(params: Any) -> Any:
        value = jnp.zeros(())
        return transformation.update(params, transformation.init(params), params, value=value)

    try:
        jax.eval_shape(step, nnx.state(model, nnx.Param))
    except Exception as error:  # an optimizer of the user's may raise anything
        raise ArgumentError(
            f"{inner.name} failed in a trial step on this model: {_first_line(error)}."
        ) from None


def _of_optax(name: str) -> Callable[..., Any]:
    short = name.removeprefix("optax.").removeprefix("contrib.")
    if short in _BEYOND_GRADIENTS:
        raise ArgumentError(
            f"{name} cannot be used here: {_BEYOND_GRADIENTS[short]}. Name one that needs "
            f"gradients only, such as adamw."
        )
    for module in (optax, optax.contrib):
        if _makes_an_optimizer(getattr(module, short, None)):
            return getattr(module, short)
    known = sorted(
        name
        for module in (optax, optax.contrib)
        for name, value in vars(module).items()
        if _makes_an_optimizer(value) and _learning_rate_of(value)
    )
    near = difflib.get_close_matches(short, known, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else "Name one like adamw, sgd or muon."
    raise ArgumentError(
        f"There is no optimizer {name!r} in optax or optax.contrib. {hint} One of your own is "
        f"named package.module:factory."
    )


def _makes_an_optimizer(value: Any) -> bool:
    if not inspect.isfunction(value):
        return False
    returns = str(inspect.signature(value).return_annotation)
    return "GradientTransformation" in returns or bool(_learning_rate_of(value))


def _learning_rate_of(factory: Callable[..., Any]) -> str | None:
    """The name of the parameter that takes the learning rate."""
    parameters = inspect.signature(factory).parameters
    return next((key for key in _LEARNING_RATES if key in parameters), None)


def _imported(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may raise anything
        raise ArgumentError(f"Cannot import {module_name!r}: {_first_line(error)}.") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"{module_name!r} has no {attribute!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(
            f"{name} must be a function that returns an Optax transformation; it is "
            f"{type(found).__name__}."
        )
    return found


def _with_learning_rate(
    factory: Callable[..., Any], name: str, given: float | None
) -> tuple[dict[str, float], float | None]:
    """The argument with the learning rate, if any, and the rate."""
    key = _learning_rate_of(factory)
    if key is None:
        if given is not None:
            raise ArgumentError(
                f"{name} takes no learning rate (no parameter {', '.join(_LEARNING_RATES[:-1])} "
                f"or {_LEARNING_RATES[-1]}). Leave --learning-rate out."
            )
        return {}, None
    if given is not None:
        return {key: given}, given
    default = inspect.signature(factory).parameters[key].default
    suitable = _SUITABLE.get(name.rpartition(".")[2])
    if isinstance(default, int | float):
        return {}, float(default)
    if suitable is None and default is not inspect.Parameter.empty:
        return {}, None
    rate = _OTHERWISE if suitable is None else suitable
    return {key: rate}, rate


def _check_nothing_missing(factory: Callable[..., Any], name: str, taken: dict[str, float]) -> None:
    missing = [
        f"`{key}`"
        for key, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and key not in taken
    ]
    if missing:
        raise ArgumentError(
            f"{name} needs {', '.join(missing)}, which cannot be given on the command line. "
            f"Write a function without it that returns the optimizer, and name that as "
            f"package.module:function."
        )


def _check_downhill(inner: optax.GradientTransformation, name: str) -> None:
    """Take a few steps on a quadratic, to find failures and ascent before the run."""
    inner = optax.with_extra_args_support(inner)
    params = {"matrix": jnp.ones((4, 4)), "vector": jnp.ones(4)}

    def step(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        # The gradient of half the sum of squares, which is that loss's value.
        value = 0.5 * optax.tree.norm(params, squared=True)
        updates, state = inner.update(params, state, params, value=value)
        return optax.apply_updates(params, updates), state, optax.tree.vdot(params, updates)

    try:
        state = inner.init(params)
        step = jax.jit(step)
        uphill = 0.0
        # Judge the first nonzero step: later ones may overshoot.
        for _ in range(3):
            params, state, slope = step(params, state)
            uphill = uphill or float(slope)
    except Exception as error:  # an optimizer of the user's may raise anything
        raise ArgumentError(f"{name} failed in a trial step: {_first_line(error)}.") from None
    if uphill > 0:
        raise ArgumentError(
            f"{name} is only a part of an optimizer: its updates increase the loss. "
            f"Chain it with optax.scale_by_learning_rate in a function of your own, and name that "
            f"as package.module:function."
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ")
