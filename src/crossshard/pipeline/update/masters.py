"""Master weights: an optimizer that keeps its parameters with more bits than the model's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard.errors import ArgumentError
from crossshard.gradients.scalars import is_inexact


class MastersState(NamedTuple):
    """Master weights and the state of the optimizer that updates them.

    Attributes:
      masters: the parameters, in the dtype of the masters.
      inner_state: the state of the inner optimizer.
    """

    masters: Any
    inner_state: Any


def with_masters(
    inner: optax.GradientTransformationExtraArgs, dtype: Any
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose parameters of fewer bits are the rounded masters (arXiv 1710.03740).

    The updates are the differences between the rounded masters and the parameters. A parameter that
    is not its rounded master was set since the last update, and becomes the master.
    """

    def init(params: Any) -> MastersState:
        # Copied, since two arrays of a donated state must not share a buffer.
        masters = jax.tree.map(lambda p: jnp.array(p, widest(p, dtype), copy=True), params)
        return MastersState(masters, inner.init(masters))

    def update(
        updates: Any, state: MastersState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MastersState]:
        if params is None:
            raise ArgumentError(
                "With master_dtype an update needs the parameters: opt.update(grads, state, params)"
            )
        masters = jax.tree.map(_unless_set, state.masters, params)
        wide = jax.tree.map(_as_master, updates, masters)
        updates, inner_state = inner.update(wide, state.inner_state, masters, **extra_args)
        masters = optax.apply_updates(masters, updates)
        # In the dtype of the masters, where it is exact.
        change = jax.tree.map(
            lambda m, p: m.astype(p.dtype).astype(m.dtype) - p.astype(m.dtype), masters, params
        )
        return change, MastersState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


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


def _as_master(gradient: Any, master: Any) -> Any:
    return gradient.astype(master.dtype) if is_inexact(master) else gradient


def widest(leaf: Any, dtype: Any) -> Any:
    """The wider of the dtype of a leaf and that of the masters."""
    own = jnp.result_type(leaf)
    return jnp.promote_types(own, dtype) if jnp.issubdtype(own, jnp.inexact) else own
