"""Gradients of a loss without arguments with respect to the variables that it reads."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossshard.collectives.all_reduce import widen
from crossshard.errors import ArgumentTypeError
from crossshard.gradients.loss_scale import scaled, unscale
from crossshard.gradients.model_sums import check_sums
from crossshard.gradients.scalars import check_scalar
from crossshard.gradients.varying_types import explained_types
from crossshard.shards.axes import Shards, check_no_further
from crossshard.variables.binding import bound, bring_out, check_writable, rebound, same_arrays
from crossshard.variables.discovery import modules_in, reachable_roots, variables_in


def check_loss(loss: Any) -> Callable[[], Any]:
    """``loss`` if it is callable, else an error that shows how to write one."""
    if not callable(loss):
        raise ArgumentTypeError(
            f"A loss must be a function without arguments, because a computed value cannot be "
            f"differentiated; got {type(loss).__name__}. Write lambda: loss_fn(model, x)."
        )
    return loss


def trainable_variables(loss: Callable[[], Any]) -> list[nnx.Variable]:
    """Every ``nnx.Param`` that was passed to the step or is reachable from the loss."""
    return [v for v in variables_in(_roots_around([loss])) if isinstance(v, nnx.Param)]


def _roots_around(reach: list[Any]) -> list[Any]:
    """Everything that a loss may read or write: the step's arguments, and what it reaches."""
    around = bound()
    mine = [] if around is None else [*around.variables, *around.modules]
    return [*mine, *reachable_roots(reach)]


def differentiate(
    loss: Callable[[], Any],
    variables: Sequence[nnx.Variable],
    shards: Shards,
    divisor: int,
    grad_loss: Any = None,
    reach: Any = None,
    loss_scale: jax.Array | None = None,
    axis_name: tuple[str, ...] = (),
) -> tuple[jax.Array, list[jax.Array | None]]:
    """The loss, and the gradient of ``loss / divisor * grad_loss`` per variable.

    ``reach`` holds further objects whose variables the loss may write, and ``axis_name`` the axes
    that count shards, if they are named.

    The loss is multiplied by ``loss_scale`` before it is differentiated, and the gradients are
    divided by it. The gradients are local; a variable that the loss does not depend on gets
    ``None``. Those of 16-bit variables have 32 bits if they are divided.
    Writes of the loss to other variables (batch statistics, counters) are kept.
    """
    given = {id(variable) for variable in variables}
    roots = _roots_around([loss, reach])
    modules = modules_in(roots)
    others = [v for v in variables_in(roots) if id(v) not in given]
    known = given | {id(other) for other in others}
    reached: set[int] = set()
    written: list[nnx.Variable] = []

    def of_values(values: list[Any], rest: list[Any]) -> Any:
        marked = [_mark(value, place, reached) for place, value in enumerate(values)]
        with rebound([*variables, *others], [*marked, *rest], modules):
            out = loss()
            after = [other.get_raw_value() for other in others]
            made = [v for v in variables_in(roots) if id(v) not in known]
        value = jnp.asarray(check_scalar(out))
        check_no_further(value, shards, values)
        changed = [not same_arrays(a, b) for a, b in zip(after, rest, strict=True)]
        written[:] = [*itertools.compress(others, changed), *made]
        kept = [*itertools.compress(after, changed), *(v.get_raw_value() for v in made)]
        divided = value if divisor == 1 or divide_after else value / divisor
        return shards.as_varying(scaled(divided, loss_scale)), (value, kept)

    values = [shards.as_varying(variable.get_raw_value()) for variable in variables]
    # Divided in 16 bits, a small gradient could underflow before it is summed.
    divide_after = divisor > 1 and any(jnp.finfo(value.dtype).bits < 32 for value in values)
    rest = [other.get_raw_value() for other in others]
    check_sums(lambda: jax.make_jaxpr(lambda values: of_values(values, rest)[0])(values), axis_name)
    with explained_types(shards):
        gradients, (value, kept) = jax.grad(of_values, has_aux=True)(values, rest)
    gradients = unscale(gradients, loss_scale)
    if divide_after:
        gradients = [widen(gradient) / divisor for gradient in gradients]
    for other, after in zip(written, kept, strict=True):
        if id(other) in known:
            check_writable(other)
            other.set_raw_value(after)
        else:
            bring_out(other, after)
    if grad_loss is not None:
        # grad_loss may be an int; a loss may not.
        seed = jnp.asarray(check_scalar(grad_loss, "grad_loss", (jnp.floating, jnp.integer)))
        gradients = [gradient * seed.astype(gradient.dtype) for gradient in gradients]
    return value, [g if place in reached else None for place, g in enumerate(gradients)]


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
