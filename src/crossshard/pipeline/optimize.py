"""Optimize: the inner optimizer's update, on full arrays, slices or global arrays."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

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
    """
    local = None if params is None else arrays.split(params)
    with inside_optimizer():
        gradients = arrays.place_gradients(gradients)
        updates, after = optimizer.update(gradients, state, local, **extra_args)
    if params is None:
        check_shapes(gradients, updates, "its update")
    result = optax.apply_updates(local, updates) if apply_updates else updates
    if skip is not None:
        keep = lambda old, new: jnp.where(skip, old, new)
        before = local if apply_updates else jax.tree.map(jnp.zeros_like, result)
        result, after = jax.tree.map(keep, (before, state), (result, after))
        # Metrics are those of the step that is taken.
        updates = jax.tree.map(lambda x: jnp.where(skip, 0, x), updates)
    return Updated(arrays.gather(result), arrays.place_state(after), updates, local)


def takes_value(optimizer: optax.GradientTransformation) -> bool:
    """Whether an optimizer's update accepts the loss as ``value``."""
    kinds = {p.name: p.kind for p in inspect.signature(optimizer.update).parameters.values()}
    return "value" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()
