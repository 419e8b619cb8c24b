"""Arguments: what the calls of a step refuse."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from crossshard import _check, _jax
from crossshard.errors import ArgumentError, ArgumentTypeError, AxisError, CrossshardError
from crossshard.gradients.scalars import is_number
from crossshard.model.state import TrainState
from crossshard.shards.batch_axes import BatchAxes


def check_not_of_mesh(error: ValueError, axes: tuple[str, ...]) -> None:
    """Raise our own error if JAX refused a loss that shards arrays over the mesh.

    Raises:
      ArgumentError: it did.
    """
    if isinstance(error, CrossshardError) or not _jax.is_of_manual_axes(error):
        return
    raise ArgumentError(
        f"The loss shards an array over the mesh, which JAX refuses "
        f"({str(error).splitlines()[0]:.80}…): inside of a step {', '.join(axes)} are the shard "
        f"axes, and each shard runs the loss on its own, on the full parameters. Leave these "
        f"axes out of with_sharding_constraint and shard_map, pass no mesh to the latter, and "
        f"write flax.linen.unbox(params) for Linen's Partitioned boxes. For a model that is split "
        f"over another axis, write make_train_step(..., mesh=mesh, axis_name=...) with the shard "
        f"axes."
    ) from error


def check_not_of_shards(error: NameError, axes: tuple[str, ...]) -> None:
    """Raise our own error if JAX has not found the shard axis that a loss over the batch names.

    Raises:
      AxisError: it has not.
    """
    axis = _jax.unbound_axis(error, axes)
    if axis is None:
        return
    where = _jax.source_of_error(error)
    raise AxisError(
        f"The loss names the shard axis {axis!r}{f' ({where})' if where else ''}, and with "
        f"loss_over='batch' it is given the rows of all shards: x.mean(0) is the mean over the "
        f"batch. Leave out pmean, all_gather, axis_index and the axis_name of a batch norm; or "
        f"write loss_over='shard'."
    ) from error


def check_state(state: Any, *, or_types: bool = True) -> None:
    """Raise unless it is a state, of arrays that JAX can hold.

    Args:
      state: the state.
      or_types: whether it may be the types of one, to compile for.

    Raises:
      ArgumentError: it was donated.
      ArgumentTypeError: it is something else.
    """
    check_is_state(state)
    _check.arrays("state", state, or_types=or_types)


def check_is_state(state: Any) -> None:
    """Raise unless it is a state that has not been donated; in a microsecond, for each step.

    Raises: as ``check_state``.
    """
    if not isinstance(state, TrainState):
        raise ArgumentTypeError(
            f"A step takes the state that init(params) or the step before returned; got "
            f"{type(state).__name__}."
        )
    # Types and traced values have no buffers.
    count = state.step
    is_int = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not is_int and (getattr(count, "shape", None) != () or count.dtype != np.int32):
        raise ArgumentTypeError(
            f"state.step is the number of steps, int32[]; got {_check.described(count)}. A state "
            f"is what init(params) or a step returned, with arrays of the same types."
        )
    has_buffer = isinstance(count, jax.Array) and not isinstance(count, jax.core.Tracer)
    if has_buffer and count.is_deleted():
        raise ArgumentError(
            "This state has been used: it was donated to a step. Use the state that the step "
            "returned: state, metrics = step(state, batch)."
        )


def refuse_more(more: Sequence[Any]) -> None:
    """Raise for what was passed to a step after the batch.

    Raises:
      ArgumentTypeError: always.
    """
    kinds = ", ".join(type(each).__name__ for each in more)
    raise ArgumentTypeError(
        f"A step takes a state and a batch; got {len(more)} more: {kinds}. Pass all arrays as one "
        f"batch, such as step(state, {{'x': x, 'y': y}}), of which the loss reads batch['x'] and "
        f"batch['y']. Pass a random key to init(params, rng=key): each step and shard derives its "
        f"own from it."
    )


# The arrays of a batch.


def check_rows(path: Any, leaf: Any, axis: int, *, or_type: bool = False) -> None:
    """Raise unless a leaf of a batch is an array with rows along an axis.

    Args:
      path: its path in the batch.
      leaf: the leaf.
      axis: the axis.
      or_type: whether it may be the type of an array, to compile for.

    Raises:
      ArgumentError: it has no rows.
      ArgumentTypeError: JAX cannot hold it.
    """
    where = f"batch{jax.tree_util.keystr(path)}"
    if is_number(leaf) and not np.shape(leaf):
        raise ArgumentError(
            f"{where} is a scalar, which has no rows to split over the shards. Name the entry in "
            f"replicated_entries, or write None for it in batch_axis, so that every shard gets it "
            f"whole. A loss that closes over a number keeps the value that it had when it was "
            f"compiled."
        )
    _check.array(where, leaf, or_type=or_type)
    if not leaf.shape[axis]:
        raise ArgumentError(f"{where} has 0 rows, which have no mean. Leave such a batch out.")


def check_same_rows(rows: Any, axes: BatchAxes) -> None:
    """Raise unless all arrays of a batch that are split have as many rows.

    Raises:
      ArgumentError: one has another number: each shard would get a part of, say, a table.
    """
    lengths = jax.tree.leaves(axes.map(lambda x, axis: x.shape[axis], rows))
    for place, length in enumerate(lengths):
        if length == lengths[0]:
            continue
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
        names, along = [jax.tree_util.keystr(paths[i]) for i in (0, place)], axes.of(rows)
        raise ArgumentError(
            f"All arrays of a batch must have as many rows, since each is split over the shards, "
            f"here along axes {along[0]} and {along[place]}; got "
            f"{sorted([lengths[0], length])}: batch{names[0]} has {lengths[0]}, and "
            f"batch{names[1]} {length}. Write the axes of the rows in make_train_step(..., "
            f"batch_axis=...); or, if every shard gets an entry whole, such as a table, its name "
            f"in replicated_entries=."
        )
