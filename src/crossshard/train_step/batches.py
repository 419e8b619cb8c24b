"""Batches placed on the shards: split along axis 0, padded where weights allow it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_number
from crossshard.jaxprs.dependence import depends
from crossshard.train_step.agreement import check_agreement
from crossshard.train_step.layout import put

Weight = Callable[[Any], Any]


def check_weight(weight: Any) -> Weight | None:
    """A function from a shard's part of the batch to its weight, from what the user gave.

    Raises:
      ArgumentTypeError: neither a function nor the name of an entry.
    """
    if weight is None or callable(weight):
        return weight
    if isinstance(weight, str):
        return SumOf(weight)
    raise ArgumentTypeError(
        f"weight must be the name of the batch's entry that counts examples or tokens, or a "
        f"function from a shard's batch to its weight; got {weight!r} ({type(weight).__name__})."
    )


@dataclasses.dataclass(frozen=True)
class SumOf:
    """The sum of one entry of the batch, such as a mask."""

    key: str

    def __call__(self, batch: Any) -> Any:
        if not isinstance(batch, dict) or self.key not in batch:
            known = list(batch) if isinstance(batch, dict) else type(batch).__name__
            raise ArgumentError(
                f"weight={self.key!r} names an entry of the batch, which has {known}."
            )
        return jnp.sum(jnp.asarray(batch[self.key], float))


def check_weight_is_read(weight: Weight, batch: Any, loss: Callable[[Any], Any]) -> None:
    """Raise if a loss does not read the entry of the batch that counts its rows.

    Args:
      weight: what a shard counts.
      batch: a shard's part of the batch.
      loss: the loss as a function of it.

    Raises:
      ArgumentError: it does not, so that rows that weigh nothing count in it.
    """
    if not isinstance(weight, SumOf):
        return
    key = weight.key
    # For its error, where there is no such entry.
    jax.eval_shape(weight, batch)
    if not depends(lambda entry: loss({**batch, key: entry}), batch[key]):
        raise ArgumentError(
            f"weight={key!r} says that batch[{key!r}] counts rows, but the loss does not read it, "
            f"so that rows of weight 0, as a batch is padded with, count in its mean. Write "
            f"(loss_of_rows * batch[{key!r}]).sum() / batch[{key!r}].sum(). If the loss leaves "
            f"such rows out by itself, say weight=lambda batch: batch[{key!r}].sum()."
        )


def weight_of(weight: Weight, batch: Any) -> jax.Array:
    """float[]: the weight of one shard's part of the batch, in JAX's default precision.

    Raises:
      ArgumentError: it is no scalar.
      ArgumentTypeError: it is no number.
    """
    given = weight(batch)
    if not is_number(given):
        raise ArgumentTypeError(
            f"A shard's weight is one number; weight gave {given!r:.40} ({type(given).__name__})."
        )
    value = jnp.asarray(given, float)
    if value.shape != ():
        raise ArgumentError(
            f"A shard's weight is one number; weight gave an array of shape {value.shape}. Sum it."
        )
    return value


class BatchPlacer:
    """Puts batches on the devices of a mesh, rows split over the shards in order."""

    def __init__(self, mesh: Mesh, weight: Weight | None):
        own = [each.process_index == jax.process_index() for each in mesh.devices.flat]
        # The parts that this process gives of a batch. A mesh to compile for, without its devices,
        # has a process all the same.
        self._parts = sum(own) if jax.process_count() > 1 else mesh.size
        self._mesh = mesh
        self._weight = weight
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._padding_weighs_nothing: set[Any] = set()
        self._agreed: set[Any] = set()

    def abstract(self, batch: Any) -> Any:
        """The types of a batch as it will lie; errors as for the batch itself."""

        def one(leaf: Any, rows: int) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            of_all = (leaf.shape[0] + rows) * self._mesh.size // self._parts
            lies_there = getattr(leaf, "sharding", None) == self._sharding
            shape = leaf.shape if lies_there else (of_all, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

        leaves, missing, tree = self._checked(batch)
        return tree.unflatten(map(one, leaves, missing))

    def __call__(self, batch: Any) -> Any:
        """The batch on the devices; what lies there already is left alone.

        A process gives its own part of the batch where there are several.

        Raises:
          ArgumentError: an array without rows, or whose rows do not divide and may not be padded.
          ArgumentTypeError: a leaf that is no array.
        """
        sharding = self._sharding
        leaves = jax.tree.leaves(batch)
        # At every step, so nothing more is asked; a traced array has no such attribute.
        if leaves and all(getattr(leaf, "sharding", None) == sharding for leaf in leaves):
            return batch
        return self._place(batch)

    def _place(self, batch: Any) -> Any:
        leaves, missing, tree = self._checked(batch)
        if self._parts < self._mesh.size and self._weight is None:
            self._check_agreement(batch)
        if any(missing):
            leaves = [_padded(leaf, rows) for leaf, rows in zip(leaves, missing, strict=True)]
        return tree.unflatten([self._put(leaf) for leaf in leaves])

    def _check_agreement(self, batch: Any) -> None:
        """Raise unless every process gives as many rows."""
        given = {
            f"batch{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        }
        key = tuple(given.items())
        if key in self._agreed:
            return
        check_agreement(
            "step",
            lambda: given,
            self._mesh,
            "The mean over the shards is that over all rows only if every process gives as many. "
            "Give as many, or say weight=, the batch's entry that counts rows.",
        )
        self._agreed.add(key)

    def _checked(self, batch: Any) -> tuple[list[Any], list[int], Any]:
        """The leaves of a batch, how many rows each is short of dividing, and its structure."""
        paths, tree = jax.tree_util.tree_flatten_with_path(batch)
        if not paths:
            raise ArgumentError("The batch is empty: it has no array.")
        for path, leaf in paths:
            _check_rows(path, leaf)
        leaves = [leaf for _, leaf in paths]
        missing = [-leaf.shape[0] % self._parts for leaf in leaves]
        if any(missing):
            self._check_padding(paths, self._parts, tree)
        return leaves, missing, tree

    def _put(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, self._sharding)
        return put(leaf, self._sharding)

    def _check_padding(self, paths: list[Any], parts: int, tree: Any) -> None:
        path, leaf = next((path, leaf) for path, leaf in paths if leaf.shape[0] % parts)
        if self._weight is None:
            rows, rest = leaf.shape[0], leaf.shape[0] % parts
            fewer = f"{rows - rest} or " if rows > parts else ""
            raise ArgumentError(
                f"batch{jax.tree_util.keystr(path)} has {rows} rows, which do not divide evenly "
                f"over {parts} shards: {rest} are left over. Give {fewer}{rows - rest + parts}, or "
                f"say weight=, the batch's entry that counts examples: then the rest is padded "
                f"with zeros, which weigh nothing."
            )
        rows = {leaf.shape[0] for _, leaf in paths}
        if len(rows) > 1:
            raise ArgumentError(
                f"A batch that is padded has arrays of one number of rows; got {sorted(rows)}."
            )
        key = tree, tuple((leaf.shape, str(leaf.dtype)) for _, leaf in paths)
        if key in self._padding_weighs_nothing:
            return
        # Else every padded batch would be a wrong mean, and nobody would be told.
        each = math.ceil(leaf.shape[0] / parts)
        nothing = tree.unflatten([_padding(x, each) for _, x in paths])
        weight = float(weight_of(self._weight, nothing))
        if weight != 0:
            raise ArgumentError(
                f"A batch of {leaf.shape[0]} rows is padded with rows of zeros to divide over "
                f"{parts} shards, and these must weigh nothing, but weight gives {weight:g} to "
                f"{each} of them. Let the batch have a mask, and weight be its sum."
            )
        self._padding_weighs_nothing.add(key)


def _check_rows(path: Any, leaf: Any) -> None:
    where = f"batch{jax.tree_util.keystr(path)}"
    if is_number(leaf) and not np.shape(leaf):
        raise ArgumentError(
            f"{where} is a scalar, which has no rows to split over the shards. Give one value per "
            f"row, as np.full(rows, value), and let the loss take the first. A loss that closed "
            f"over a number would keep the one that it had when it was compiled."
        )
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise ArgumentTypeError(
            f"{where} must be an array; got {leaf!r:.60} ({type(leaf).__name__})."
        )
    kind = getattr(leaf.dtype, "kind", "")
    if kind in "OSUMm" and kind:
        raise ArgumentTypeError(f"{where} is an array of {leaf.dtype}, which JAX cannot hold.")
    if not leaf.shape[0]:
        raise ArgumentError(f"{where} has 0 rows, which have no mean. Leave such a batch out.")


def _padding(leaf: Any, rows: int) -> Any:
    """Rows of zeros; of keys, which know no zero, the first of them."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(leaf[:1], (rows, *leaf.shape[1:]))
    return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)


def _padded(leaf: Any, rows: int) -> Any:
    together = jnp.concatenate if isinstance(leaf, jax.Array) else np.concatenate
    return together([leaf, _padding(leaf, rows)])
