"""Optimize: the inner optimizer's update, on full arrays, slices or global arrays."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard.gradients.incoming import check_shapes
from crossshard.gradients.nesting import inside_optimizer
from crossshard.pipeline.arrays import Arrays


class Updated(NamedTuple):
    """The result of an optimizer's update.

    Attributes:
      result: full updates, or full updated parameters.
      state: the optimizer's next state.
      updates: the updates, split as the optimizer's arrays are.
      params: the parameters before it, split in the same way; ``None`` if the caller passed none.
    """

    result: Any
    state: Any
    updates: Any
    params: Any


def apply_optimizer(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Any,
    state: Any,
    params: Any,
    extra_args: Mapping[str, Any],
    arrays: Arrays,
    *,
    apply_updates: bool,
    skip: jax.Array | None = None,
    by_loop: bool = False,
) -> Updated:
    """Update parameters with an inner optimizer.

    Args:
      optimizer: the inner optimizer.
      gradients: the reduced gradients, split as in ``arrays``.
      state: the optimizer's state, split as in ``arrays``.
      params: the full parameters.
      extra_args: the extra arguments of the optimizer.
      arrays: how arrays are split.
      apply_updates: whether to apply the updates and return updated parameters. Gathering these is
        cheaper than gathering updates and applying them on every shard.
      skip: bool[], whether everything stays unchanged; ``None`` for never.
      by_loop: whether to run the update in a loop of one turn, or none if it is skipped, rather
        than select between its results and what was before; the update has no collectives.
    """
    local = None if params is None else arrays.split(params)
    gradients = arrays.place_gradients(gradients)

    def update(state: Any, local: Any) -> _Results:
        with inside_optimizer():
            updates, after = optimizer.update(gradients, state, local, **extra_args)
        if local is None:
            check_shapes(gradients, updates, "its update")
        return updates, after, optax.apply_updates(local, updates) if apply_updates else None

    with jax.named_scope("update"):
        if skip is None:
            updates, after, updated = update(state, local)
        elif by_loop and apply_updates:
            updates, after, updated = _in_loop(update, state, local, skip)
        else:
            new = update(state, local)
            updates, after, updated = _select(new, state, local if apply_updates else None, skip)
    with jax.named_scope("gather"):
        result = arrays.gather(updated if apply_updates else updates)
    return Updated(result, arrays.place_state(after), updates, local)


# The updates, the optimizer's next state, and the updated parameters.
_Results = tuple[Any, Any, Any]


def _select(new: _Results, state: Any, params: Any, skip: jax.Array) -> _Results:
    """The results of an update, or what was before if it is skipped."""
    old = jax.tree.map(jnp.zeros_like, new[0]), state, params
    return jax.tree.map(lambda old, new: jnp.where(skip, old, new), old, new)


def _in_loop(
    update: Callable[[Any, Any], _Results], state: Any, params: Any, skip: jax.Array
) -> _Results:
    """The same, from a loop that runs once or not at all.

    It works in place, where XLA for CPUs copies arrays that a select may keep.
    """
    types = jax.eval_shape(update, state, params)
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    if of(types[1:]) != of((state, params)):
        # A loop keeps its types, and a select converts them.
        return _select(update(state, params), state, params, skip)
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types[0])

    def turn(before: tuple[Any, ...]) -> tuple[Any, ...]:
        _, _, state, params = before
        return jnp.bool_(True), *update(state, params)

    _, *results = lax.while_loop(lambda carry: ~carry[0], turn, (skip, none, state, params))
    return tuple(results)


def takes_value(optimizer: optax.GradientTransformation) -> bool:
    """Whether an optimizer's update accepts the loss as ``value``."""
    kinds = {p.name: p.kind for p in inspect.signature(optimizer.update).parameters.values()}
    return "value" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()
