"""Arrive: what the gradients of a step already are, before any stage has run."""

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
    beside: Mapping[str, Any] | None = None,
    weight: jax.Array | None = None,
) -> Gradients:
    """Gradients with what is known of each.

    Args:
      pipeline: the way that they will go.
      values: a pytree of this shard's arrays.
      shards: the shards that reduce.
      declared: what the caller says they are; ``None`` to go by the pipeline or by their types.
      beside: what is reduced with them.
      weight: float[], what this shard counts.

    Raises:
      DoubleReductionError, IncomingError: see ``read_incoming``.
      ArgumentTypeError: a leaf that is sparse, or neither real nor complex.
    """
    declared = declared or pipeline.incoming
    beside = dict(beside or {})

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

    beside_status: tuple[Incoming | None, ...] = ()
    for name in sorted(beside):
        known = _of_loss(beside[name], shards, declared) if name == "value" else declared
        beside_status += of_tree({name: beside[name]}, known)
    return Gradients(
        values,
        beside,
        weight,
        status=of_tree(values, declared),
        beside_status=beside_status,
    )


def _of_loss(loss: Any, shards: Shards, declared: Incoming | None) -> Incoming | None:
    """What a loss is: each shard's own, unless its type says that it is equal on all."""
    if declared not in (None, Incoming.SCALED):
        return declared
    equal = shards.has_vma and not shards.is_varying(loss)
    return Incoming.REDUCED if equal else Incoming.LOCAL
