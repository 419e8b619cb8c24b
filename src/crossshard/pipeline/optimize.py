"""Optimize: the wrapped optimizer's update, on whole arrays, in parts or on global arrays."""

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
    """Whole updates, or whole updated parameters, and the optimizer's next state.

    Args:
      optimizer: the wrapped optimizer.
      gradients: the reduced gradients, split as ``arrays`` says.
      state: the optimizer's state, split likewise.
      params: the parameters, whole.
      extra_args: what the optimizer takes besides.
      arrays: how arrays are split.
      apply_updates: whether updates are applied, and updated parameters handed back. To gather
        these is cheaper than to gather updates and apply them on every shard.
      skip: bool[], whether all is to stay as it was; ``None`` for never.
    """
    own = None if params is None else arrays.split(params)
    with inside_optimizer():
        result, after = optimizer.update(arrays.lay(gradients), state, own, **extra_args)
    if params is None:
        check_shapes(gradients, result, "its update")
    if apply_updates:
        result = optax.apply_updates(own, result)
    if skip is not None:
        before = own if apply_updates else jax.tree.map(jnp.zeros_like, result)
        result, after = jax.tree.map(
            lambda old, new: jnp.where(skip, old, new), (before, state), (result, after)
        )
    return arrays.gather(result), arrays.keep(after)


def takes_value(optimizer: optax.GradientTransformation) -> bool:
    """Whether an optimizer's update accepts the loss as ``value``."""
    kinds = {p.name: p.kind for p in inspect.signature(optimizer.update).parameters.values()}
    return "value" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()
