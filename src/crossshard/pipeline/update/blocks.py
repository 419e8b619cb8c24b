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
from crossshard.pipeline.update.plan import as_function, as_updates, why_not_in_parts
from crossshard.shards.axes import Shards
from crossshard.shards.model_axes import other_axes_like
from crossshard.shards.partition import Partition


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
    leaves = jax.tree_util.tree_leaves_with_path(params)
    is_split = lambda x: not tracked or not _jax.varying_axes(x).isdisjoint(axes)
    splits = [("split",) if is_split(x) else () for _, x in leaves]
    if not any(splits):
        return
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    for transformation in transformations:
        obstacle = _why_not_on_blocks(transformation, whole, splits)
        if obstacle is None:
            continue
        name = next(leaf_name(path) for path, x in leaves if is_split(x))
        what = ", ".join(map(repr, axes))
        found = f"{name} is split" if tracked else f"Parameters such as {name} may be split"
        types = "" if tracked else " If they are not, pass check_vma=True, so that types tell."
        named = ", ".join(map(repr, shards.axes))
        raise WeightUpdateError(
            f"{found} over {what}, which is not a shard axis here, and each device would "
            f"update its block alone, but the update needs whole arrays: {obstacle}. Leave {what} "
            f"to XLA, with jax.shard_map(..., axis_names={{{named}}}), or write "
            f"crossshard.make_train_step(..., mesh=mesh, axis_name={shards.axes!r}).{types}"
        )


def _why_not_on_blocks(
    transformation: optax.GradientTransformationExtraArgs, params: Any, splits: Sequence[Any]
) -> str | None:
    """Why a transformation cannot run on blocks of some parameters; ``None`` if it can."""
    with inside_optimizer():
        state = jax.eval_shape(transformation.init, params)

    def blocks(tree: Any, splits: Sequence[Any]) -> list[Partition]:
        pairs = zip(jax.tree.leaves(tree), splits, strict=True)
        return [_half(x.shape) if own else Partition(x.shape) for x, own in pairs]

    of_params = blocks(params, splits)
    of_state = blocks(state, other_axes_like(state, params, splits))
    try:
        update = as_function(as_updates(transformation))
        return why_not_in_parts(update, params, state, of_params, of_state)
    except TypeError as error:  # it takes more arguments, such as the loss function
        return f"it cannot be traced from gradients and the loss, {str(error).splitlines()[0]}"


def _half(shape: tuple[int, ...]) -> Partition:
    """A partition in two, along an axis if one divides; of a single element there is none."""
    axis = next((axis for axis, size in enumerate(shape) if size % 2 == 0), None)
    return Partition(shape, 2, axis) if math.prod(shape) > 1 else Partition(shape)
