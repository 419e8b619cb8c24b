"""BatchAxes: where the arrays of a batch have their rows; VirtualShards: which shard has which."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


@dataclasses.dataclass(frozen=True)
class VirtualShards:
    """How many virtual shards each shard has: as many as any other, or the first ones one more.

    >>> uneven = VirtualShards(8, 3)
    >>> [uneven.count(shard) for shard in range(3)], uneven.first(2)
    ([3, 3, 2], 6)
    """

    number: int  # how many there are on all shards together
    shards: int  # how many shards there are, at most ``number``

    @property
    def is_even(self) -> bool:
        """Whether each shard has as many."""
        return self.number % self.shards == 0

    @property
    def most(self) -> int:
        """How many a shard has at most, and has room for."""
        return -(-self.number // self.shards)

    def first(self, shard: Any) -> Any:
        """Return the first virtual shard of a shard, whose index is an int or int32[]."""
        if self.is_even:
            return shard * self.most
        least = jnp.minimum if isinstance(shard, jax.Array) else min
        return shard * (self.most - 1) + least(shard, self.number % self.shards)

    def count(self, shard: Any) -> Any:
        """Return how many a shard has."""
        return self.most if self.is_even else self.first(shard + 1) - self.first(shard)

    @property
    def levels(self) -> int:
        """How many levels of the tree a shard adds by itself: no subtree may end elsewhere.

        >>> [VirtualShards(number, 4).levels for number in (32, 24, 12, 7)]
        [3, 1, 0, 0]
        """
        return (self.most & -self.most).bit_length() - 1 if self.is_even else 0

    @property
    def nodes(self) -> int:
        """How many nodes that leaves, or how many a shard has room for."""
        return self.most >> self.levels

    def filled(self, nodes: Any) -> Any:
        """Return those of all shards' ``[shards · nodes, …]`` that virtual shards have filled."""
        if self.is_even:
            return nodes
        room = np.arange(self.shards * self.most).reshape(self.shards, -1)
        own = [room[shard, : self.count(shard)] for shard in range(self.shards)]
        return nodes[np.concatenate(own)]
