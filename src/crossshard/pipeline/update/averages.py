"""Averages: an optimizer that also keeps its parameters averaged over the steps, or wider."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard import _check
from crossshard._check import is_inexact
from crossshard.errors import ArgumentError, ArgumentTypeError

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


class MastersState(NamedTuple):
    """Master weights and the state of the optimizer that updates them.

    Attributes:
      masters: the parameters, in the dtype of the masters.
      inner_state: the state of the inner optimizer.
    """

    masters: Any
    inner_state: Any


def with_moving_average(
    inner: optax.GradientTransformationExtraArgs, decay: Decay
) -> optax.GradientTransformationExtraArgs:
    """Keeps ``ema = decay * ema + (1 - decay) * params`` after each update of an optimizer."""

    def init(params: Any) -> MovingAverageState:
        count = jnp.int32(0) if callable(decay) else ()
        return MovingAverageState(_copied(params, jnp.float32), count, inner.init(params))

    def update(
        updates: Any, state: MovingAverageState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MovingAverageState]:
        params = _needed(params, "ema")
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


def with_masters(
    inner: optax.GradientTransformationExtraArgs, dtype: Any
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose parameters of fewer bits are the rounded masters (arXiv 1710.03740).

    The updates are the differences between the rounded masters and the parameters. A parameter that
    is not its rounded master was set since the last update, and becomes the master.
    """

    def init(params: Any) -> MastersState:
        masters = _copied(params, dtype)
        return MastersState(masters, inner.init(masters))

    def update(
        updates: Any, state: MastersState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MastersState]:
        params = _needed(params, "master_dtype")
        masters = jax.tree.map(_unless_set, state.masters, params)
        as_master = lambda g, m: g.astype(m.dtype) if is_inexact(m) else g
        wide = jax.tree.map(as_master, updates, masters)
        updates, inner_state = inner.update(wide, state.inner_state, masters, **extra_args)
        masters = optax.apply_updates(masters, updates)
        # In the dtype of the masters, where it is exact.
        change = jax.tree.map(
            lambda m, p: m.astype(p.dtype).astype(m.dtype) - p.astype(m.dtype), masters, params
        )
        return change, MastersState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _needed(params: Any, option: str) -> Any:
    if params is None:
        raise ArgumentError(
            f"With {option} an update needs the parameters: opt.update(grads, state, params)."
        )
    return params


def _copied(params: Any, dtype: Any) -> Any:
    """The parameters in this dtype, or in their own if it is wider."""

    def one(x: Any) -> jax.Array:
        own = jnp.result_type(x)
        wide = jnp.promote_types(own, dtype) if jnp.issubdtype(own, jnp.inexact) else own
        # Copied, since two arrays of a donated state must not share a buffer.
        return jnp.array(x, wide, copy=True)

    return jax.tree.map(one, params)


def _unless_set(master: Any, param: Any) -> jax.Array:
    """The master; the parameter where it is another number than the rounded master."""
    wide, narrow = master.dtype, jnp.result_type(param)
    if wide == narrow:
        return jnp.where(param == master, master, param)
    # The change that made the parameter is itself rounded, and can tip it over near a tie.
    near = 4 * float(jnp.finfo(wide).eps)
    below, above = (_is_same(param, (master * by).astype(narrow)) for by in (1 - near, 1 + near))
    return jnp.where(below | above, master, jnp.asarray(param, wide))


def _is_same(one: Any, other: jax.Array) -> jax.Array:
    if other.dtype.itemsize > 2:
        return one == other
    # By their bits: XLA may leave out the rounding of a number that it then compares as a wide one.
    bits, others = (
        lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in (one, other)
    )
    # Zeros of both signs are equal.
    return (bits == others) | ((bits | others) << 1 == 0)


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
