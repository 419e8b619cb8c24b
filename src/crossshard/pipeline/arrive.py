"""Arrive: the gradients of a step with the status of each, before the first stage."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.gradients.status import (
    GradientStatus,
    Statuses,
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
    declared: GradientStatus | None = None,
    extra: Mapping[str, Any] | None = None,
    weight: jax.Array | None = None,
    params: Any = None,
    widened: bool = False,
    early: tuple[bool, ...] = (),
) -> Gradients:
    """The gradients with the status of each leaf, and the dtype in which it is to be reduced.

    Args:
      pipeline: the pipeline that will reduce them.
      values: a pytree of this shard's arrays.
      shards: the shards that reduce.
      declared: their declared status; ``None`` for the pipeline's, or to read it from their types.
      extra: further values to reduce with them.
      weight: float[], the weight of this shard.
      params: the parameters, if they are known.
      widened: whether the values have more bits than the gradients that they stand for.
      early: for each leaf whether the backward pass has summed it; see ``Gradients``.

    Raises:
      DoubleReductionError, IncomingError: see ``read_incoming``.
      ArgumentTypeError: a leaf that is sparse, or neither real nor complex.
    """
    declared = declared or pipeline.incoming
    extra = dict(extra or {})

    how: Any = {"reduction": pipeline.reduction, "grouped": not pipeline.over_all_shards}

    def of_leaf(name: str, leaf: Any, declared: GradientStatus | None) -> GradientStatus | None:
        check_gradient_dtype(name, leaf)
        if jnp.result_type(leaf) == jax.dtypes.float0:
            return None
        return read_incoming(name, leaf, shards, declared, **how)

    def of_tree(tree: Any, declared: GradientStatus | None) -> Statuses:
        paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse)
        return tuple(of_leaf(leaf_name(path), leaf, declared) for path, leaf in paths)

    extra_status: Statuses = ()
    for name in sorted(extra):
        known = _of_loss(extra[name], shards, declared) if name == "value" else declared
        extra_status += of_tree({name: extra[name]}, known)
    done = early or (False,) * len(jax.tree.leaves(values))
    status = tuple(
        GradientStatus.SUMMED if is_done else each
        for each, is_done in zip(of_tree(values, declared), done, strict=True)
    )

    def dtype_of(leaf: Any, param: Any, status: GradientStatus | None, is_done: bool) -> Any:
        # compute_gradients divides in float32, and 16-bit parameters need 16-bit gradients.
        is_wide = (
            is_done or widened or pipeline.accumulate is not None or status is GradientStatus.SCALED
        )
        dtype = jnp.result_type(param if is_wide else leaf)
        if pipeline.master_dtype is not None and status is not None:
            dtype = jnp.promote_types(dtype, pipeline.master_dtype)
        return dtype

    # The parameters of optax.lookahead have more leaves than the gradients.
    like = jax.tree.leaves(values if params is None else params)
    dtypes = map(dtype_of, jax.tree.leaves(values), like, status, done)
    dtypes_of_extra = map(jnp.result_type, jax.tree.leaves(extra))
    return Gradients(
        values,
        extra,
        weight,
        status=status,
        extra_status=extra_status,
        early=early,
        dtypes=(*dtypes_of_extra, *dtypes),
    )


def _of_loss(loss: Any, shards: Shards, declared: GradientStatus | None) -> GradientStatus | None:
    """The status of a loss: local, unless it is invariant."""
    if declared not in (None, GradientStatus.SCALED):
        return declared
    invariant = shards.has_vma and not shards.is_varying(loss)
    return GradientStatus.REDUCED if invariant else GradientStatus.LOCAL
