"""Gradients of a loss without arguments with respect to the variables that it reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check, _flax
from crossshard._flax import AnyVariable
from crossshard.collectives.sums import widen
from crossshard.errors import VariableError
from crossshard.gradients.autodiff import check_sums, explained_types, scaled, unscale
from crossshard.gradients.mean import Mean, part_of_shard
from crossshard.nnx.binding import bound, check_writable
from crossshard.nnx.graph import reached_in, same_arrays
from crossshard.shards.axes import Shards, check_no_further


def differentiate(
    loss: Callable[[], Any],
    variables: Sequence[AnyVariable],
    shards: Shards,
    divisor: int,
    grad_loss: Any = None,
    given: Any = None,
    loss_scale: jax.Array | None = None,
    axis_name: tuple[str, ...] = (),
    shards_of_mean: Callable[[], Shards] | None = None,
) -> tuple[jax.Array, list[jax.Array | None], jax.Array | None]:
    """The loss, and the gradient of ``loss / divisor * grad_loss`` per variable.

    The third result is whether a ``Mean`` counts no row at all; ``None`` if some always count.

    ``given`` holds modules whose variables the loss may write, besides those of the step, and
    ``axis_name`` the shard axes, if they are named. ``shards_of_mean`` returns the shards
    over which a ``Mean`` is counted, or raises.

    The loss is multiplied by ``loss_scale`` before it is differentiated, and the gradients are
    divided by it. The gradients are local; a variable that the loss does not depend on gets
    ``None``. Those of 16-bit variables have 32 bits if they are divided.
    Writes of the loss to other variables (batch statistics, counters) are kept.
    """
    around = bound()
    below = reached_in([[] if around is None else around.reached.roots, given])
    differentiated = {id(variable) for variable in variables}
    others = [v for v in below.variables if id(v) not in differentiated]
    known = differentiated | {id(other) for other in others}
    reached: set[int] = set()
    written: list[AnyVariable] = []

    def of_values(values: list[Any], rest: list[Any]) -> Any:
        marked = [_mark(value, place, reached) for place, value in enumerate(values)]
        with _flax.rebound([*variables, *others], [*marked, *rest], below.modules):
            out = _called(loss)
            after = [other.get_raw_value() for other in others]
            made = [v for v in reached_in(below.roots).variables if id(v) not in known]
        empty = None
        if isinstance(out, Mean) and shards_of_mean is not None:
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
    rest = [other.get_raw_value() for other in others]
    check_sums(lambda: jax.make_jaxpr(lambda values: of_values(values, rest)[0])(values), axis_name)
    with explained_types(shards):
        gradients, (value, kept, empty) = jax.grad(of_values, has_aux=True)(values, rest)
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
