"""Puts batches on the mesh: split along axis 0, padded if there are weights."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_number
from crossshard.jaxprs.dependence import depends
from crossshard.pipeline.stages.weigh import as_weight
from crossshard.shards.mesh import number_of_shards
from crossshard.shards.put import own_parts, put

Weight = Callable[[Any], Any]


def check_weight(weight: Any) -> Weight | None:
    """The weight function of the ``weight`` argument: from a shard's batch to its weight.

    Raises:
      ArgumentTypeError: ``weight`` is neither a function nor the name of an entry.
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
                f"weight={self.key!r} names an entry of the batch, but the batch has {known}."
            )
        return jnp.sum(jnp.asarray(batch[self.key], float))


def check_weight_is_read(weight: Weight, batch: Any, loss: Callable[[Any], Any]) -> None:
    """Raise if a loss does not read the entry of the batch that counts its rows.

    Args:
      weight: the weight function.
      batch: one shard's rows of the batch.
      loss: the loss as a function of the batch.

    Raises:
      ArgumentError: the loss does not read the entry, so rows of weight 0 count in it.
    """
    if not isinstance(weight, SumOf):
        return
    key = weight.key
    # Raises if there is no such entry.
    jax.eval_shape(weight, batch)
    if not depends(lambda entry: loss({**batch, key: entry}), batch[key]):
        raise ArgumentError(
            f"weight={key!r} means that batch[{key!r}] counts rows, but the loss does not read it, "
            f"so rows of weight 0, such as those of padding, count in its mean. Write "
            f"(loss_of_rows * batch[{key!r}]).sum() / batch[{key!r}].sum(). If the loss leaves "
            f"such rows out on its own, pass weight=lambda batch: batch[{key!r}].sum()."
        )


def weight_of(weight: Weight, batch: Any) -> jax.Array:
    """float[]: the weight of one shard's rows of the batch; for errors see ``as_weight``."""
    return as_weight(weight(batch), "weight returned")


class BatchPlacer:
    """Puts batches on the devices of a mesh, rows split over the shards in order."""

    def __init__(
        self, mesh: Mesh, axes: tuple[str, ...], weight: Weight | None, microbatches: int = 1
    ):
        self._sharding = NamedSharding(mesh, PartitionSpec(axes))
        self._number = number_of_shards(mesh, axes)
        self._parts = own_parts(self._sharding, self._number)
        # Rows are split over the shards, and a shard's rows into microbatches.
        self._multiple = self._parts * microbatches
        self._mesh = mesh
        self._weight = weight
        self._padding_weighs_nothing: set[Any] = set()
        self._agreed: set[Any] = set()

    def abstract(self, batch: Any) -> Any:
        """The types and shardings of a batch on the mesh; raises as for the batch itself."""

        def one(leaf: Any, rows: int) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            of_all = (leaf.shape[0] + rows) * self._number // self._parts
            is_placed = getattr(leaf, "sharding", None) == self._sharding
            shape = leaf.shape if is_placed else (of_all, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

        leaves, missing, tree = self._checked(batch)
        return tree.unflatten(map(one, leaves, missing))

    def __call__(self, batch: Any) -> Any:
        """Put a batch on the devices; arrays with the right sharding are returned unchanged.

        If there are several processes, each passes its own rows.

        Raises:
          ArgumentError: an array has no rows, or rows that do not divide and may not be padded.
          ArgumentTypeError: a leaf is not an array.
        """
        sharding = self._sharding
        leaves = jax.tree.leaves(batch)
        # A fast check, since it runs at every step; a tracer has no such attribute.
        if leaves and all(getattr(leaf, "sharding", None) == sharding for leaf in leaves):
            return batch
        # To move a batch is asked for, and padding is a part of it.
        with jax.transfer_guard("allow"):
            return self._place(batch)

    def rows_of(self, batch: Any) -> str:
        """What this process passes, as it tells the others: with weights, of any number of rows."""
        words = []
        for leaf in jax.tree.leaves(batch):
            rows, *others = np.shape(leaf) or (1,)
            if getattr(leaf, "sharding", None) == self._sharding:
                rows = rows * self._parts // self._number
            sizes = ["any" if self._weight else rows, *others]
            words.append(f"{getattr(leaf, 'dtype', '')}[{','.join(map(str, sizes))}]")
        return ",".join(words)

    def _place(self, batch: Any) -> Any:
        leaves, missing, tree = self._checked(batch)
        if self._parts < self._number and self._weight is None:
            self._check_agreement(batch)
        if any(missing):
            leaves = [_padded(leaf, rows) for leaf, rows in zip(leaves, missing, strict=True)]
        return tree.unflatten([self._put(leaf) for leaf in leaves])

    def _check_agreement(self, batch: Any) -> None:
        """Raise unless every process passes as many rows."""
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
            "The mean over the shards is that over all rows only if every process passes as many. "
            "Pass as many, or pass weight=, the batch's entry that counts rows.",
        )
        self._agreed.add(key)

    def _checked(self, batch: Any) -> tuple[list[Any], list[int], Any]:
        """The leaves of a batch, the rows of padding that each needs, and its structure."""
        paths, tree = jax.tree_util.tree_flatten_with_path(batch)
        if not paths:
            raise ArgumentError("The batch is empty: it has no array.")
        for path, leaf in paths:
            check_rows(path, leaf)
        leaves = [leaf for _, leaf in paths]
        missing = [-leaf.shape[0] % self._multiple for leaf in leaves]
        if any(missing):
            self._check_padding(paths, self._multiple, tree)
        return leaves, missing, tree

    def _put(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, self._sharding)
        return put(leaf, self._sharding)

    @property
    def _pieces(self) -> str:
        number = self._multiple // self._parts
        return f"{self._parts} shards" + (f" of {number} microbatches" if number > 1 else "")

    def _check_padding(self, paths: list[Any], parts: int, tree: Any) -> None:
        path, leaf = next((path, leaf) for path, leaf in paths if leaf.shape[0] % parts)
        if self._weight is None:
            rows, rest = leaf.shape[0], leaf.shape[0] % parts
            fewer = f"{rows - rest} or " if rows > parts else ""
            raise ArgumentError(
                f"batch{jax.tree_util.keystr(path)} has {rows} rows, which do not divide evenly "
                f"over {self._pieces}: {rest} are left over. Pass {fewer}{rows - rest + parts}, or "
                f"weight=, the batch's entry that counts examples: the batch is then padded with "
                f"rows of weight 0."
            )
        check_same_rows(paths)
        key = tree, tuple((leaf.shape, str(leaf.dtype)) for _, leaf in paths)
        if key in self._padding_weighs_nothing:
            return
        # Otherwise the padding would silently change the mean.
        each = math.ceil(leaf.shape[0] / parts)
        nothing = tree.unflatten([_padding(x, each) for _, x in paths])
        weight = float(weight_of(self._weight, nothing))
        if weight != 0:
            raise ArgumentError(
                f"A batch of {leaf.shape[0]} rows is padded with rows of zeros to divide over "
                f"{self._pieces}, and these must have weight 0, but weight returns {weight:g} for "
                f"{each} of them. Add a mask to the batch and pass its name as weight."
            )
        self._padding_weighs_nothing.add(key)


def check_rows(path: Any, leaf: Any) -> None:
    """Raise unless a leaf of a batch is an array with rows.

    Raises:
      ArgumentError: it has no rows.
      ArgumentTypeError: JAX cannot hold it.
    """
    where = f"batch{jax.tree_util.keystr(path)}"
    if is_number(leaf) and not np.shape(leaf):
        raise ArgumentError(
            f"{where} is a scalar, which has no rows to split over the shards. Name the entry in "
            f"replicated_entries, so that every shard gets it whole. A loss that closes over a "
            f"number keeps the value that it had when it was compiled."
        )
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise ArgumentTypeError(
            f"{where} must be an array; got {leaf!r:.60} ({type(leaf).__name__})."
        )
    check_dtype(where, leaf)
    if not leaf.shape[0]:
        raise ArgumentError(f"{where} has 0 rows, which have no mean. Leave such a batch out.")


def check_same_rows(paths: Sequence[tuple[Any, Any]]) -> None:
    """Raise unless all arrays of a batch, each with its path, have as many rows.

    Raises:
      ArgumentError: one has another number: each shard would get a part of, say, a table.
    """
    (first, leaf), *others = paths
    for path, other in others:
        if other.shape[0] == leaf.shape[0]:
            continue
        names = [jax.tree_util.keystr(each) for each in (first, path)]
        raise ArgumentError(
            f"All arrays of a batch must have as many rows, since each is split over the shards "
            f"along axis 0; got {sorted([leaf.shape[0], other.shape[0]])}: batch{names[0]} has "
            f"{leaf.shape[0]}, and batch{names[1]} {other.shape[0]}. Name an entry that every "
            f"shard gets whole, such as a table, in make_train_step(..., replicated_entries=...)."
        )


def check_dtype(where: str, leaf: Any) -> None:
    """Raise if JAX cannot hold an array."""
    kind = getattr(getattr(leaf, "dtype", None), "kind", "")
    if kind in "OSUMm" and kind:
        raise ArgumentTypeError(f"{where} is an array of {leaf.dtype}, which JAX cannot hold.")


def _padding(leaf: Any, rows: int) -> Any:
    """Rows of zeros; for PRNG keys, copies of the first row."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(leaf[:1], (rows, *leaf.shape[1:]))
    return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)


def _padded(leaf: Any, rows: int) -> Any:
    together = jnp.concatenate if isinstance(leaf, jax.Array) else np.concatenate
    return together([leaf, _padding(leaf, rows)])
