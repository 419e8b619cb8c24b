"""Refuses a sum in a loss over an axis that counts no shards, where autodiff sums it again."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from crossshard import _jax
from crossshard.errors import AxisError
from crossshard.jaxprs.walk import Analysis, Equations, follow
from crossshard.shards.axes import UntypedAxes, untyped_axes


def check_sums(trace: Callable[[], Any], axis_name: tuple[str, ...]) -> None:
    """Raise if JAX's gradient of a loss is too large by the size of a further axis.

    Without types, autodiff turns a ``psum`` into a ``psum``. That is right over shards, whose
    losses are added, and wrong over an axis along which all compute the same loss. The loss is
    traced only where an axis without types is bound besides those that count shards.

    Args:
      trace: returns the jaxpr of the loss as a function of what is differentiated.
      axis_name: the axes that count shards; empty if they are not named.

    Raises:
      AxisError: such a ``psum`` is on the way from the parameters to the loss, outside of a
        function with a derivative of its own.
    """
    axes = untyped_axes(axis_name)
    if not axes.further:
        return
    jaxpr = trace()
    (found,) = follow(_Sums(axes), [jaxpr], [_DERIVED] * len(jaxpr.in_avals))
    if found is not None and found is not _DERIVED:
        raise AxisError(_refusal(found, axes))


_DERIVED = object()


class _Sums(Analysis[Any]):
    """``None`` without a derivative, ``_DERIVED`` with one, or the equation that sums one."""

    def __init__(self, axes: UntypedAxes) -> None:
        self._axes = axes

    def constant(self, values: Sequence[Any]) -> None:
        del values

    def join(self, facts: Sequence[Any]) -> Any:
        some = [fact for fact in facts if fact is not None]
        return next((fact for fact in some if fact is not _DERIVED), _DERIVED if some else None)

    def control(self, equations: Equations, decides: Any) -> None:
        """Nothing: a choice has no derivative."""
        del equations, decides

    def enters(self, equations: Equations) -> bool:
        return not _jax.has_own_derivative(equations[0])

    def transfer(self, equations: Equations, inputs: Sequence[Any]) -> Sequence[Any]:
        (equation,) = equations
        fact = None if equation.primitive.name == "stop_gradient" else self.join(inputs)
        if fact is _DERIVED and self.enters(equations):
            fact = self._sum_in(equation) or _DERIVED
        floating = [jnp.issubdtype(out.aval.dtype, jnp.inexact) for out in equation.outvars]
        return [fact if each else None for each in floating]

    def _sum_in(self, equation: Any) -> Any:
        """This equation, or one that it runs, if it sums over an axis that counts no shards."""
        if _axes_of(equation, self._axes):
            return equation
        inner = (each for jaxpr in _jax.jaxprs_in(equation) for each in _jax.opened(jaxpr).eqns)
        return next(filter(None, map(self._sum_in, inner)), None)


def _axes_of(equation: Any, axes: UntypedAxes) -> tuple[str, ...]:
    """The axes of a sum that count no shards, or that nobody has named."""
    summed = _jax.untyped_sum(equation)
    # All of several may count shards.
    if not axes.named and summed.issuperset(axes.bound):
        return ()
    return tuple(axis for axis in axes.further if axis in summed)


def _refusal(equation: Any, axes: UntypedAxes) -> str:
    over = _axes_of(equation, axes)
    number = math.prod(axes.further[axis] for axis in over)
    line = _jax.source_of(equation)
    names = ", ".join(map(repr, over))
    shards = axes.named or tuple(axis for axis in axes.bound if axis not in over)
    counted = "counts no shards" if axes.named else "is not named as one that counts shards"
    return (
        f"The loss has a psum or pmean over {names}{f' ({line})' if line else ''}, which "
        f"{counted}. Under check_vma=False autodiff turns a psum into a psum, so that the gradient "
        f"would be {number} times too large. Write jax.shard_map(..., check_vma=True) and "
        f"{_written(shards)}; or a psum with a jax.custom_vjp, which hands the gradient on as it "
        f"is. If each shard along {names} has rows of its own, write "
        f"{_written((*shards, *over))}."
    )


def _written(names: tuple[str, ...]) -> str:
    return f"axis_name={names if len(names) > 1 else names[0]!r}"
