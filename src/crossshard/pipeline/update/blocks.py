"""Blocks: refuses an update of single blocks of parameters that needs whole arrays."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard import _jax
from crossshard.errors import WeightUpdateError
from crossshard.gradients.nesting import inside_optimizer
from crossshard.gradients.status import leaf_name
from crossshard.jaxprs.elementwise import why_not_elementwise
from crossshard.pipeline.update.optimize import takes_value
from crossshard.shards.axes import Shards
from crossshard.shards.model_axes import other_axes_like
from crossshard.shards.partition import Partition, map_partitions


def check_blocks(
    transformations: Sequence[optax.GradientTransformationExtraArgs], params: Any, shards: Shards
) -> None:
    """Raise if parameters are split over other manual axes, and a transformation needs them whole.

    Without ``check_vma`` types do not tell what is split, and every parameter counts as split.

    Raises:
      WeightUpdateError: a transformation is not elementwise.
    """
    unnamed = _jax.manual_axes().difference(shards.axes) if shards.axes else frozenset()
    axes = sorted(axis for axis in unnamed if lax.axis_size(axis) > 1)
    if not axes:
        return
    tracked = all(map(_jax.has_vma, axes))
    split = {
        path: x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if not tracked or _jax.varying_axes(x).intersection(axes)
    }
    if not split:
        return
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    splits = [
        ("split",) if path in split else ()
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    for transformation in transformations:
        obstacle = _why_not_on_blocks(transformation, whole, splits)
        if obstacle is None:
            continue
        name, what = leaf_name(next(iter(split))), ", ".join(map(repr, axes))
        is_split = f"{name} is split" if tracked else f"Parameters such as {name} may be split"
        types = "" if tracked else " If they are not, pass check_vma=True, so that types tell."
        named = ", ".join(map(repr, shards.axes))
        raise WeightUpdateError(
            f"{is_split} over {what}, which is not a shard axis here, and each device would "
            f"update its block alone, but the update needs whole arrays: {obstacle}. Leave {what} "
            f"to XLA, with jax.shard_map(..., axis_names={{{named}}}), or write "
            f"crossshard.make_train_step(..., mesh=mesh, axis_name={shards.axes!r}).{types}"
        )


def _why_not_on_blocks(
    transformation: optax.GradientTransformationExtraArgs, params: Any, splits: Sequence[Any]
) -> str | None:
    """Why a transformation cannot run on blocks of some parameters; ``None`` if it can."""

    def update(params: Any, state: Any, gradients: Any, value: Any) -> tuple[Any, Any]:
        extra_args = {"value": value} if takes_value(transformation) else {}
        with inside_optimizer():
            return transformation.update(gradients, state, params, **extra_args)

    def blocks(tree: Any, splits: Sequence[Any]) -> Any:
        halves = [
            _half(x.shape) if own else Partition(x.shape)
            for x, own in zip(jax.tree.leaves(tree), splits, strict=True)
        ]
        local = lambda half, x: jax.ShapeDtypeStruct(half.local_shape, x.dtype)
        return map_partitions(local, halves, tree)

    with inside_optimizer():
        state = jax.eval_shape(transformation.init, params)
    loss = jax.ShapeDtypeStruct((), "float32")
    of_params, of_state = (
        blocks(params, splits),
        blocks(state, other_axes_like(state, params, splits)),
    )
    try:
        return why_not_elementwise(
            update, (params, state, params, loss), (of_params, of_state, of_params, loss)
        )
    except TypeError as error:  # it takes more arguments, such as the loss function
        return f"it cannot be traced from gradients and the loss, {str(error).splitlines()[0]}"


def _half(shape: tuple[int, ...]) -> Partition:
    """A partition in two, along an axis if one divides; of a single element there is none."""
    axis = next((axis for axis, size in enumerate(shape) if size % 2 == 0), None)
    return Partition(shape, 2, axis) if math.prod(shape) > 1 else Partition(shape)
