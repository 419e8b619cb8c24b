"""Optimize: the inner optimizer's update, on full arrays, slices or global arrays."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard.gradients.incoming import check_shapes
from crossshard.gradients.nesting import inside_optimizer
from crossshard.pipeline.arrays import Arrays


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
) -> tuple[Any, Any]:
    """Full updates, or full updated parameters, and the optimizer's next state.

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
        result, after = optimizer.update(
            arrays.place_gradients(gradients), state, local, **extra_args
        )
    if params is None:
        check_shapes(gradients, result, "its update")
    if apply_updates:
        result = optax.apply_updates(local, result)
    if skip is not None:
        before = local if apply_updates else jax.tree.map(jnp.zeros_like, result)
        result, after = jax.tree.map(
            lambda old, new: jnp.where(skip, old, new), (before, state), (result, after)
        )
    return arrays.gather(result), arrays.place_state(after)


def takes_value(optimizer: optax.GradientTransformation) -> bool:
    """Whether an optimizer's update accepts the loss as ``value``."""
    kinds = {p.name: p.kind for p in inspect.signature(optimizer.update).parameters.values()}
    return "value" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()
