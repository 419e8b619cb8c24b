"""Entries: the entries of a batch that every shard gets whole, such as a temperature or a table."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_number
from crossshard.shards.put import put
from crossshard.step.arguments import check_dtype
from crossshard.step.weight import SumOf, Weight


def check_entries(names: Any, weight: Weight | None) -> tuple[str, ...]:
    """The checked ``replicated_entries`` argument.

    Raises:
      ArgumentError: one of them is the weight.
      ArgumentTypeError: they are not names.
    """
    given = tuple(names) if isinstance(names, tuple | list) else ()
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in given):
        raise ArgumentTypeError(
            f"replicated_entries is a tuple of names of the batch's entries, such as "
            f"('temperature',); got {names!r:.60}."
        )
    if isinstance(weight, SumOf) and weight.key in given:
        raise ArgumentError(
            f"{weight.key!r} is the weight, which counts each shard's own rows, so every shard "
            f"cannot have all of it. Leave it out of replicated_entries."
        )
    return given


def split_entries(batch: Any, names: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """The entries of a batch that are split, and those that every shard gets whole.

    Raises:
      ArgumentError: the batch does not have them.
    """
    if not names:
        return batch, {}
    if not isinstance(batch, dict) or not set(names) <= set(batch):
        known = list(batch) if isinstance(batch, dict) else type(batch).__name__
        raise ArgumentError(
            f"replicated_entries={names} names entries of the batch, but the batch has {known}."
        )
    rows = {name: entry for name, entry in batch.items() if name not in names}
    return rows, {name: batch[name] for name in names}


def join_entries(rows: Any, whole: dict[str, Any]) -> Any:
    """The inverse of ``split_entries``."""
    return {**rows, **whole} if whole else rows


def specs_of(batch: Any, names: tuple[str, ...], split: PartitionSpec) -> Any:
    """The specs of a batch, given that of the entries that are split."""
    if not names:
        return split
    return {name: PartitionSpec() if name in names else split for name in batch}


class WholeEntries:
    """Puts the entries that every shard gets whole on the devices of a mesh."""

    def __init__(self, mesh: Mesh, names: tuple[str, ...]):
        self._mesh = mesh
        self._names = names
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._equal: set[Any] = set()

    def split(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The entries of a batch that are split, and the whole ones as arrays.

        Raises:
          ArgumentError: the batch does not have them.
          ArgumentTypeError: a whole entry holds something else than numbers.
        """
        rows, whole = split_entries(batch, self._names)
        for path, leaf in jax.tree_util.tree_leaves_with_path(whole):
            where = f"batch{jax.tree_util.keystr(path)}"
            if not is_number(leaf):
                raise ArgumentTypeError(
                    f"{where} must be an array or a number; got {leaf!r:.60} "
                    f"({type(leaf).__name__})."
                )
            check_dtype(where, leaf)
        # A Python number would be a part of the program.
        return rows, jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), whole)

    def abstract(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Their types and shardings."""

        def one(x: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=self._everywhere)

        return {name: jax.tree.map(one, entry) for name, entry in whole.items()}

    def place(self, whole: dict[str, Any]) -> dict[str, Any]:
        """The entries on the devices.

        If there are several processes, the entries are compared when their shapes are new.

        Raises:
          ArgumentError: another process passes others.
        """
        leaves = jax.tree.leaves(whole)
        key = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if leaves and key not in self._equal and not any(map(_is_traced, leaves)):
            check_agreement(
                "step",
                lambda: {f"batch[{name!r}]": checksum(entry) for name, entry in whole.items()},
                self._mesh,
                "Every process must pass the same entries of replicated_entries.",
            )
            self._equal.add(key)
        return {name: jax.tree.map(self._put, entry) for name, entry in whole.items()}

    def _put(self, x: Any) -> jax.Array:
        if _is_traced(x):
            return _jax.constrained(x, self._everywhere)
        return x if getattr(x, "sharding", None) == self._everywhere else put(x, self._everywhere)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)
