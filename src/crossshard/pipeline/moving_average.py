"""Moving average: an optimizer that also averages its parameters over the steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_inexact, is_number
from crossshard.pipeline.masters import widest


class MovingAverageState(NamedTuple):
    """The moving average of the parameters, and the state of the optimizer.

    Attributes:
      ema: the average, with at least 32 bits; at first the parameters.
      inner_state: the state of the inner optimizer.
    """

    ema: Any
    inner_state: Any


def with_moving_average(
    inner: optax.GradientTransformationExtraArgs, decay: float
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that keeps ``ema = decay * ema + (1 - decay) * params`` after each update."""

    def average(old: jax.Array, new: jax.Array) -> jax.Array:
        return decay * old + (1 - decay) * new if is_inexact(old) else new

    def init(params: Any) -> MovingAverageState:
        return MovingAverageState(jax.tree.map(_copy, params), inner.init(params))

    def update(
        updates: Any, state: MovingAverageState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MovingAverageState]:
        if params is None:
            raise ArgumentError(
                "With ema an update needs the parameters: opt.update(grads, state, params)."
            )
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        after = optax.apply_updates(params, updates)
        ema = jax.tree.map(average, state.ema, after)
        return updates, MovingAverageState(ema, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _copy(x: Any) -> jax.Array:
    return jnp.array(x, widest(x, jnp.float32), copy=True)


def check_ema(decay: Any) -> float | None:
    """The decay of the moving average; ``None`` without one.

    Raises:
      ArgumentError: not between 0 and 1.
      ArgumentTypeError: not a number.
    """
    if decay is None:
        return None
    if not is_number(decay) or isinstance(decay, bool) or jnp.shape(decay):
        raise ArgumentTypeError(
            f"ema must be the decay of the moving average, a number such as 0.999; got "
            f"{decay!r:.60} ({type(decay).__name__})."
        )
    if not 0 < float(decay) < 1:
        raise ArgumentError(
            f"ema is the decay of the moving average of the parameters, between 0 and 1, such as "
            f"0.999; got {decay!r}."
        )
    return float(decay)
