"""BatchAxes: along which axis each array of a batch has its rows, and which arrays are whole."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from crossshard import _check
from crossshard.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class BatchAxes:
    """Along which axis each array of a batch has its rows; an array without one is whole.

    >>> import numpy as np
    >>> axes = check_batch_axis({"x": 1, "table": None})
    >>> axes.of({"x": np.ones((2, 3)), "table": np.ones(4)})
    [None, 1]
    """

    # The axes of a pytree prefix of the batch, in the order of its leaves.
    axes: tuple[int | None, ...]
    tree: Any  # its structure
    whole: tuple[str, ...] = ()  # the names of entries of a dict batch that are whole beside these

    def of(self, batch: Any, name: str = "batch") -> list[int | None]:
        """Return the axis of each array of a batch, counted from the first; ``None`` if whole.

        Args:
          batch: a pytree of arrays or types; leaves of other kinds, or without axes, always pass.
          name: what an error calls it.

        Raises:
          ArgumentError: the axes do not fit the batch, or an array has no such axis.
        """
        found: list[int | None] = []
        for axis, part in zip(self.axes, self._parts(batch, name), strict=True):
            for leaf in jax.tree.leaves(part):
                ndim = getattr(leaf, "ndim", 0)
                if axis is None or not ndim or 0 <= axis < ndim:
                    found.append(axis)
                elif -ndim <= axis < 0:
                    found.append(axis + ndim)
                else:
                    raise _no_axis(batch, name, len(found), leaf, axis)
        if not self.whole:
            return found
        paths = jax.tree_util.tree_leaves_with_path(batch)
        return [
            None if path[0].key in self.whole else axis
            for (path, _), axis in zip(paths, found, strict=True)
        ]

    def _parts(self, batch: Any, name: str) -> list[Any]:
        """Return the part of a batch to which each axis applies."""
        if self.whole and not (isinstance(batch, dict) and set(self.whole) <= set(batch)):
            known = list(batch) if isinstance(batch, dict) else type(batch).__name__
            raise ArgumentError(
                f"replicated_entries={self.whole} names entries of the batch, but the batch has "
                f"{known}."
            )
        try:
            parts: list[Any] = self.tree.flatten_up_to(batch)
        except ValueError:
            given, wanted = self.tree.unflatten(self.axes), _words(jax.tree.structure(batch))
            raise ArgumentError(
                f"batch_axis={_check.shown(given, 200)} does not fit {name}, which is "
                f"{wanted:.300}. Write one axis for all of it, or for each of its "
                f"entries an axis, or None if every shard gets it whole."
            ) from None
        return parts

    def of_rows(self, rows: Any) -> list[int]:
        """Return the axis of each array of a batch without its whole arrays."""
        return [axis for axis in self.of(rows) if axis is not None]

    def tree_of(self, batch: Any) -> Any:
        """Return ``of`` in the structure of the batch."""
        return jax.tree.structure(batch).unflatten(self.of(batch))

    def lengths(self, rows: Any) -> list[int]:
        """Return the number of rows of each array of a batch without its whole arrays."""
        pairs = zip(jax.tree.leaves(rows), self.of_rows(rows), strict=True)
        return [x.shape[axis] for x, axis in pairs]

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into arrays with rows, and whole arrays; ``None`` stands for the others."""
        axes = self.of(batch)
        if None not in axes:
            return batch, None
        leaves, tree = jax.tree.flatten(batch)
        pairs = list(zip(leaves, axes, strict=True))
        rows = [None if axis is None else x for x, axis in pairs]
        return tree.unflatten(rows), tree.unflatten([x if a is None else None for x, a in pairs])

    def specs(self, batch: Any, names: tuple[str, ...]) -> Any:
        """Return the spec of each array of a batch whose rows are split over these mesh axes."""
        leaves = [spec_along(axis, names) for axis in self.of(batch)]
        return jax.tree.structure(batch).unflatten(leaves)


# Axis 0 of all arrays.
FIRST = BatchAxes((0,), jax.tree.structure(0))


def join(rows: Any, whole: Any) -> Any:
    """Undo ``BatchAxes.split``."""
    if whole is None:
        return rows
    return jax.tree.map(lambda x, y: y if x is None else x, rows, whole, is_leaf=_is_none)


def spec_along(axis: int | None, names: tuple[str, ...]) -> PartitionSpec:
    """Return the spec of an array that is split along an axis; of a whole one if it is ``None``."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, names)


def resized(shape: Sequence[int], axis: int | None, rows: int) -> tuple[int, ...]:
    """Return a shape with ``rows`` rows along an axis; the same shape without an axis."""
    return tuple(shape) if axis is None else (*shape[:axis], rows, *shape[axis + 1 :])


def take_rows(x: Any, axis: int, rows: Any) -> Any:
    """Return these rows of an array along an axis, given as a slice, or as their indices."""
    return x[(slice(None),) * axis + (rows,)]


def axes_of(prefix: Any) -> BatchAxes:
    """Return the axes of a pytree prefix of a batch.

    Raises:
      ArgumentTypeError: an axis is not an int.
    """
    axes, tree = jax.tree.flatten(prefix, is_leaf=_is_none)
    for axis in axes:
        if axis is not None and type(axis) is not int:
            raise ArgumentTypeError(
                f"batch_axis is an int, or a pytree prefix of the batch with ints, and None for "
                f"what every shard gets whole, such as {{'x': 1, 'table': None}}; got "
                f"{_check.described(axis)}."
            )
    return BatchAxes(tuple(axes), tree)


def check_batch_axis(batch_axis: Any, whole: Sequence[str] = ()) -> BatchAxes:
    """Return the checked ``batch_axis`` argument, with the names of ``replicated_entries``."""
    found = axes_of(batch_axis)
    if all(map(_is_none, found.axes)):
        raise ArgumentError(
            f"batch_axis={_check.shown(batch_axis, 100)} has no axis, so that every shard "
            f"would get the whole batch. Write the axis of the rows of what is to be split."
        )
    if whole and not jax.tree_util.treedef_is_leaf(found.tree):
        raise ArgumentError(
            f"batch_axis={_check.shown(batch_axis, 100)} says how each entry is split, and "
            f"replicated_entries={tuple(whole)} says it again. Write None in batch_axis for these."
        )
    return dataclasses.replace(found, whole=tuple(whole))


def _no_axis(batch: Any, name: str, place: int, leaf: Any, axis: int) -> ArgumentError:
    where = f"{name}{jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(batch)[place][0])}"
    return ArgumentError(
        f"{where} has shape {tuple(leaf.shape)} and no axis {axis} to split along. Write an axis "
        f"for each entry, such as batch_axis={{'x': 1, 'y': 0}}, or None for what is whole."
    )


def _words(tree: Any) -> str:
    if jax.tree_util.treedef_is_leaf(tree):
        return "one array"
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")")


def _is_none(x: Any) -> bool:
    return x is None
