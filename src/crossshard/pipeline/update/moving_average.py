"""Moving average: an optimizer that also averages its parameters over the steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from crossshard import _check
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_inexact
from crossshard.pipeline.update.masters import widest

# A number, or a schedule of the number of updates.
Decay = float | Callable[[Any], Any]


class MovingAverageState(NamedTuple):
    """The moving average of the parameters, and the state of the optimizer.

    Attributes:
      ema: the average, with at least 32 bits; at first the parameters.
      ema_count: int32[], the number of updates so far; ``()`` unless the decay is a schedule.
      inner_state: the state of the inner optimizer.
    """

    ema: Any
    ema_count: Any
    inner_state: Any


def with_moving_average(
    inner: optax.GradientTransformationExtraArgs, decay: Decay
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that keeps ``ema = decay * ema + (1 - decay) * params`` after each update.

    Args:
      inner: the optimizer.
      decay: a number, or a schedule: a function of the number of updates before this one.
    """

    def init(params: Any) -> MovingAverageState:
        count = jnp.int32(0) if callable(decay) else ()
        return MovingAverageState(jax.tree.map(_copy, params), count, inner.init(params))

    def update(
        updates: Any, state: MovingAverageState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MovingAverageState]:
        if params is None:
            raise ArgumentError(
                "With ema an update needs the parameters: opt.update(grads, state, params)."
            )
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        after = optax.apply_updates(params, updates)
        now = jnp.asarray(decay(state.ema_count)) if callable(decay) else decay

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            if not is_inexact(old):
                return new
            # A schedule's decay may have another dtype; a number has none of its own.
            by = now.astype(old.dtype) if isinstance(now, jax.Array) else now
            return by * old + (1 - by) * new

        ema = jax.tree.map(average, state.ema, after)
        count = optax.safe_increment(state.ema_count) if callable(decay) else ()
        return updates, MovingAverageState(ema, count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _copy(x: Any) -> jax.Array:
    return jnp.array(x, widest(x, jnp.float32), copy=True)


def describe_decay(decay: Decay) -> str:
    """A decay in a few words, the same in every process."""
    if not callable(decay):
        return str(decay)
    return f"by {getattr(decay, '__qualname__', type(decay).__name__)}"


def check_ema(decay: Any) -> Decay | None:
    """The decay of the moving average; ``None`` without one.

    Raises:
      ArgumentError: not between 0 and 1.
      ArgumentTypeError: not a number, and no function that returns one.
    """
    if decay is None:
        return None
    if callable(decay):
        _check_schedule(decay)
        return decay  # type: ignore[no-any-return]
    is_array = isinstance(decay, jax.Array) and not decay.shape
    if is_array and jnp.issubdtype(decay.dtype, jnp.floating):
        decay = _check.array("ema", decay).item()
    hint = (
        "It is the decay of the moving average, or a schedule: a function of the update's number."
    )
    found = _check.number("ema", decay, hint)
    if not 0 < found < 1:
        raise ArgumentError(
            f"ema is the decay of the moving average of the parameters, between 0 and 1, such as "
            f"0.999; got {decay!r}."
        )
    return found


def _check_schedule(decay: Callable[[Any], Any]) -> None:
    try:
        found = jax.eval_shape(decay, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # a user's function may raise anything
        raise ArgumentTypeError(
            f"ema is a function that cannot be called with an update's number, int32[]: {error}"
        ) from error
    if not isinstance(found, jax.ShapeDtypeStruct) or found.shape or not is_inexact(found):
        raise ArgumentTypeError(
            f"A schedule for ema returns the decay, float[]; this one returned {found}."
        )
