"""Entries: which of a batch are split, and those that every shard gets whole, such as a table."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _check, _mesh
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.shards.batch_axes import BatchAxes, check_batch_axis
from crossshard.shards.put import put
from crossshard.step.weight import SumOf, Weight


def check_entries(batch_axis: Any, names: Any, weight: Weight | None) -> BatchAxes:
    """The checked ``batch_axis`` and ``replicated_entries`` arguments.

    Raises:
      ArgumentError: they contradict each other, or the weight is whole.
      ArgumentTypeError: they are not axes, or not names.
    """
    given = tuple(names) if isinstance(names, tuple | list) else ()
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in given):
        raise ArgumentTypeError(
            f"replicated_entries is a tuple of names of the batch's entries, such as "
            f"('temperature',); got {_check.shown(names)}."
        )
    axes = check_batch_axis(batch_axis, given)
    if isinstance(weight, SumOf):
        named = weight.key in given
        if named or (isinstance(batch_axis, dict) and batch_axis.get(weight.key, 0) is None):
            instead = "Leave it out of replicated_entries" if named else "Write its axis"
            raise ArgumentError(
                f"{weight.key!r} is the weight, which counts each shard's own rows, so every shard "
                f"cannot have all of it. {instead}."
            )
    return axes


class WholeEntries:
    """Puts the arrays of a batch that every shard gets whole on the devices of a mesh."""

    def __init__(self, mesh: Mesh, axes: BatchAxes):
        self._mesh = mesh
        self._axes = axes
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._equal: set[Any] = set()

    def split(self, batch: Any, *, or_types: bool = False) -> tuple[Any, Any]:
        """A batch without its whole arrays, and with these alone, as ``BatchAxes.split``.

        Args:
          batch: the batch.
          or_types: whether it may hold types of arrays, to compile for.

        Raises:
          ArgumentError: the axes do not fit the batch.
          ArgumentTypeError: what is whole holds something else than numbers.
        """
        rows, whole = self._axes.split(batch)
        _check.arrays("batch", whole, or_types=or_types)
        # A Python number would be a part of the program.
        return rows, jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), whole)

    def abstract(self, whole: Any) -> Any:
        """Their types and shardings."""

        def one(x: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=self._everywhere)

        return jax.tree.map(one, whole)

    def place(self, whole: Any) -> Any:
        """The arrays on the devices.

        If there are several processes, the arrays are compared when their shapes are new.

        Raises:
          ArgumentError: another process passes others.
        """
        leaves = jax.tree.leaves(whole)
        key = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if leaves and key not in self._equal and not any(map(_is_traced, leaves)):
            check_agreement(
                "step",
                lambda: {
                    f"batch{jax.tree_util.keystr(path)}": checksum(leaf)
                    for path, leaf in jax.tree_util.tree_leaves_with_path(whole)
                },
                self._mesh,
                "Every process must pass the same entries of replicated_entries, or of None in "
                "batch_axis.",
            )
            self._equal.add(key)
        return jax.tree.map(self._put, whole)

    def _put(self, x: Any) -> jax.Array:
        if _is_traced(x):
            return _mesh.constrained(x, self._everywhere)
        return x if getattr(x, "sharding", None) == self._everywhere else put(x, self._everywhere)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)
