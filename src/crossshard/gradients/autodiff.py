"""Around autodiff: a loss is checked, scaled, and refused where its gradient would be another."""

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _check, _jax
from crossshard.collectives.sums import widen
from crossshard.errors import ArgumentTypeError, AxisError
from crossshard.gradients.mean import Mean
from crossshard.jaxprs.walk import (
    Analysis,
    Equations,
    equations_within,
    follow,
    has_own_derivative,
    named_axes,
)
from crossshard.shards.axes import Shards, get_shard_context


def split_loss(
    out: Any, has_aux: bool, kinds: tuple[Any, ...] = (jnp.floating,)
) -> tuple[Any, Any]:
    """The loss, a ``Mean`` or a scalar of one of these kinds, and ``aux``, of what it returned."""
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    if has_aux and not is_pair:
        raise ArgumentTypeError(
            f"With has_aux=True a function returns (loss, aux); this one returned "
            f"{type(out).__name__}."
        )
    if is_pair and not has_aux:
        raise ArgumentTypeError(
            f"A loss must be a floating scalar; this function returned a {type(out).__name__} of "
            f"two. If it returned (loss, aux), pass has_aux=True."
        )
    loss, aux = out if has_aux else (out, None)
    return loss if isinstance(loss, Mean) else _check.scalar(loss, kinds=kinds), aux


def scaled(loss: Any, scale: Any) -> Any:
    """``loss * scale`` in the dtype of the loss; the loss itself if ``scale`` is ``None``."""
    return loss if scale is None else loss * scale.astype(loss.dtype)


def unscale(gradients: Any, scale: Any) -> Any:
    """The gradients of a loss, with at least 32 bits, from those of ``scaled(loss, scale)``."""
    if scale is None:
        return gradients

    def one(leaf: Any) -> Any:
        if leaf.dtype == jax.dtypes.float0:
            return leaf
        wide = widen(leaf)
        return wide / scale.astype(wide.dtype)

    return jax.tree.map(one, gradients)


@contextmanager
def explained_types(shards: Shards) -> Iterator[None]:
    """Trace a loss; where JAX compares types in vain, say how to make them equal."""
    try:
        yield
    except TypeError as error:
        if not shards.has_vma or not _jax.is_of_varying_types(error):
            raise
        axes = shards.axes if len(shards.axes) > 1 else shards.axes[0]
        cast = f"jax.lax.pcast(jnp.zeros(()), {axes!r}, to='varying')"
        raise ArgumentTypeError(
            f"A loop or branch in the loss has a value that is equal on all shards, such as "
            f"jnp.zeros(()), where the other is varying over {axes!r}: the first carry and the "
            f"next, or the outputs of two branches. shard_map(check_vma=True) tells them apart. "
            f"Write {cast} for the former, or pass check_vma=False to that shard_map, under which "
            f"the gradients here are the same."
        ) from error


def check_sums(trace: Callable[[], Any], axis_name: tuple[str, ...]) -> None:
    """Raise if JAX's gradient of a loss is too large by the size of a further axis.

    Without types, autodiff turns a ``psum`` into a ``psum``, and an ``all_gather`` into a scatter
    that sums. That is right over shards, whose losses are added, and wrong over an axis along which
    all compute the same loss. The loss is traced only where an axis without types is bound besides
    the shard axes. Refused is such a ``psum``, or such an ``all_gather`` of more than parameters,
    on the way from the parameters to the loss, outside of a function with a derivative of its own.

    Args:
      trace: returns the jaxpr of the loss as a function of what is differentiated.
      axis_name: the shard axes; empty if they are not named.
    """
    bound, context = _jax.bound_axes(), get_shard_context()
    # A single axis is known to count the shards.
    only = tuple(bound) if len(bound) == 1 else ()
    named = axis_name or (context.axis_name if context else ()) or only
    untyped = (axis for axis in bound if axis not in named and not _jax.has_vma(axis))
    axes = _Axes(named, tuple(bound), {axis: bound[axis] for axis in untyped if bound[axis] > 1})
    if not axes.further:
        return
    jaxpr = trace()
    (found,) = follow(_Sums(axes), [jaxpr], [_Of.PARAMETERS] * len(jaxpr.in_avals))
    if found is not None and not isinstance(found, _Of):
        raise AxisError(_refusal(found, axes))


class _Axes(NamedTuple):
    """The bound axes."""

    named: tuple[str, ...]  # those of the shards; empty if none is named
    bound: tuple[str, ...]  # all of them
    further: dict[str, int]  # of the others, those without types, with their sizes


class _Of(enum.Enum):
    """What a value is computed from; nothing but literals if it is none of these."""

    DATA = 1
    PARAMETERS = 2
    BOTH = 3


class _Sums(Analysis[Any]):
    """``None``, an ``_Of``, or the equation that sums what has a derivative."""

    def __init__(self, axes: _Axes) -> None:
        self._axes = axes

    def constant(self, values: Sequence[Any]) -> _Of | None:
        return _Of.DATA if any(np.ndim(value) for value in values) else None

    def join(self, facts: Sequence[Any]) -> Any:
        some = {fact for fact in facts if isinstance(fact, _Of)}
        summed = (fact for fact in facts if fact is not None and not isinstance(fact, _Of))
        alone = some.pop() if len(some) == 1 else (_Of.BOTH if some else None)
        return next(summed, alone)

    def control(self, equations: Equations, decides: Any) -> None:
        """Nothing: a choice has no derivative."""
        del equations, decides

    def enters(self, equations: Equations, inputs: Sequence[Any]) -> bool:
        del inputs
        return not has_own_derivative(equations[0])

    def transfer(self, equations: Equations, inputs: Sequence[Any]) -> Sequence[Any]:
        (equation,) = equations
        fact = self.join(inputs)
        if fact in (_Of.PARAMETERS, _Of.BOTH) and self.enters(equations, inputs):
            # A gather of parameters alone puts together what each shard with its own rows needs.
            names = ("psum",) if fact is _Of.PARAMETERS else ("psum", "all_gather")
            run = (equation, *equations_within(equation))
            fact = next((each for each in run if _axes_of(each, self._axes, names)), fact)
        still = None if fact in (None, _Of.PARAMETERS) else _Of.DATA
        stops = equation.primitive.name == "stop_gradient"
        floating = [jnp.issubdtype(out.aval.dtype, jnp.inexact) for out in equation.outvars]
        return [fact if each and not stops else still for each in floating]


def _axes_of(
    equation: Any, axes: _Axes, names: tuple[str, ...] = ("psum", "all_gather")
) -> tuple[str, ...]:
    """The axes of a collective that count no shards, or that nobody has named."""
    if equation.primitive.name not in names or equation.params.get("axis_index_groups"):
        return ()
    summed = named_axes(equation)
    # All of several may be shard axes.
    if not axes.named and summed.issuperset(axes.bound):
        return ()
    return tuple(axis for axis in axes.further if axis in summed)


def _refusal(equation: Any, axes: _Axes) -> str:
    over = _axes_of(equation, axes)
    number = math.prod(axes.further[axis] for axis in over)
    line = _jax.source_of(equation)
    what = "an all_gather" if equation.primitive.name == "all_gather" else "a psum or pmean"
    names = ", ".join(map(repr, over))
    shards = axes.named or tuple(axis for axis in axes.bound if axis not in over)
    counted = "is not a shard axis" if axes.named else "is not named as a shard axis"
    return (
        f"The loss has {what} over {names}{f' ({line})' if line else ''}, which {counted}. Under "
        f"check_vma=False autodiff sums over {names} again, so that the gradient would be {number} "
        f"times too large. Write jax.shard_map(..., check_vma=True) and {_written(shards)}; or "
        f"{what.split()[1]} in a jax.custom_vjp, whose backward pass does not sum. If each shard "
        f"along {names} has rows of its own, write {_written((*shards, *over))}."
    )


def _written(names: tuple[str, ...]) -> str:
    return f"axis_name={names if len(names) > 1 else names[0]!r}"
