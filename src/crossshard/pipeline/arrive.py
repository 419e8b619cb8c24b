"""Arrive: the gradients of a step with the status of each, before the first stage."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.gradients.incoming import (
    Incoming,
    check_gradient_dtype,
    is_sparse,
    leaf_name,
    read_incoming,
)
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stage import Gradients
from crossshard.shards.axes import Shards


def arrive(
    pipeline: Pipeline,
    values: Any,
    shards: Shards,
    *,
    declared: Incoming | None = None,
    extra: Mapping[str, Any] | None = None,
    weight: jax.Array | None = None,
) -> Gradients:
    """The gradients with the status of each leaf.

    Args:
      pipeline: the pipeline that will reduce them.
      values: a pytree of this shard's arrays.
      shards: the shards that reduce.
      declared: their declared status; ``None`` for the pipeline's, or to read it from their types.
      extra: further values to reduce with them.
      weight: float[], the weight of this shard.

    Raises:
      DoubleReductionError, IncomingError: see ``read_incoming``.
      ArgumentTypeError: a leaf that is sparse, or neither real nor complex.
    """
    declared = declared or pipeline.incoming
    extra = dict(extra or {})

    def status(name: str, leaf: Any, declared: Incoming | None) -> Incoming | None:
        check_gradient_dtype(name, leaf)
        if jnp.result_type(leaf) == jax.dtypes.float0:
            return None
        return read_incoming(
            name,
            leaf,
            shards,
            declared,
            reduction=pipeline.reduction,
            grouped=not pipeline.over_all_shards,
        )

    def of_tree(tree: Any, declared: Incoming | None) -> tuple[Incoming | None, ...]:
        paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse)
        return tuple(status(leaf_name(path), leaf, declared) for path, leaf in paths)

    extra_status: tuple[Incoming | None, ...] = ()
    for name in sorted(extra):
        known = _of_loss(extra[name], shards, declared) if name == "value" else declared
        extra_status += of_tree({name: extra[name]}, known)
    return Gradients(
        values,
        extra,
        weight,
        status=of_tree(values, declared),
        extra_status=extra_status,
    )


def _of_loss(loss: Any, shards: Shards, declared: Incoming | None) -> Incoming | None:
    """The status of a loss: local, unless it is invariant."""
    if declared not in (None, Incoming.SCALED):
        return declared
    invariant = shards.has_vma and not shards.is_varying(loss)
    return Incoming.REDUCED if invariant else Incoming.LOCAL
