"""Puts batches on the mesh: split along axis 0, padded if there are weights; some entries whole."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax
from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError
from crossshard.shards.mesh import number_of_shards
from crossshard.shards.put import own_parts, put
from crossshard.step.arguments import check_rows, check_same_rows
from crossshard.step.entries import WholeEntries, join_entries
from crossshard.step.weight import Weight, weight_of


class BatchPlacer:
    """Puts batches on the devices of a mesh, rows split over the shards in order.

    Args:
      mesh: the mesh.
      axes: its shard axes.
      weight: the weight function; ``None`` if all shards count the same.
      names: the entries that every shard gets whole.
      microbatches: the number of pieces of a shard's rows.
      takes_weight: whether the step could be given a weight, so that errors may speak of it.
    """

    def __init__(
        self,
        mesh: Mesh,
        axes: tuple[str, ...],
        weight: Weight | None,
        names: tuple[str, ...] = (),
        microbatches: int = 1,
        *,
        takes_weight: bool = True,
    ):
        self._sharding = NamedSharding(mesh, PartitionSpec(axes))
        self._number = number_of_shards(mesh, axes)
        self._parts = own_parts(self._sharding, self._number)
        # Rows are split over the shards, and a shard's rows into microbatches.
        self._multiple = self._parts * microbatches
        self._mesh = mesh
        self._weight = weight
        self._takes_weight = takes_weight
        self._whole = WholeEntries(mesh, names)
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

        rows, whole = self._whole.split(batch)
        leaves, missing, tree = self._checked(rows, whole)
        return join_entries(tree.unflatten(map(one, leaves, missing)), self._whole.abstract(whole))

    def __call__(self, batch: Any) -> Any:
        """Put a batch on the devices; arrays with the right sharding are returned unchanged.

        If there are several processes, each passes its own rows, and all of them the same whole
        entries.

        Raises:
          ArgumentError: an array has no rows, or rows that do not divide and may not be padded.
          ArgumentTypeError: a leaf is not an array.
        """
        rows, whole = self._whole.split(batch)
        placed = self._whole.place(whole)
        sharding = self._sharding
        leaves = jax.tree.leaves(rows)
        # A fast check, since it runs at every step; a tracer has no such attribute.
        if leaves and all(getattr(leaf, "sharding", None) == sharding for leaf in leaves):
            return join_entries(rows, placed)
        # To move a batch is asked for, and padding is a part of it.
        with jax.transfer_guard("allow"):
            if not _jax.at_top_level():
                return join_entries(self._place(rows, whole), placed)
            rows = jax.tree.map(lambda leaf: _jax.on_mesh(leaf, None), rows)
            with _jax.in_place_of_the_users_mesh(_jax.with_automatic_axes(self._mesh)):
                return join_entries(self._place(rows, whole), placed)

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

    def _place(self, rows: Any, whole: dict[str, Any]) -> Any:
        leaves, missing, tree = self._checked(rows, whole)
        if self._parts < self._number and self._weight is None:
            self._check_agreement(rows)
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
        or_weight = ", or pass weight=, the batch's entry that counts rows."
        check_agreement(
            "step",
            lambda: given,
            self._mesh,
            "The mean over the shards is that over all rows only if every process passes as many. "
            f"Pass as many{or_weight if self._takes_weight else '.'}",
        )
        self._agreed.add(key)

    def _checked(self, rows: Any, whole: dict[str, Any]) -> tuple[list[Any], list[int], Any]:
        """The leaves of the rows, the padding that each needs, and their structure."""
        paths, tree = jax.tree_util.tree_flatten_with_path(rows)
        if not paths:
            raise ArgumentError("The batch is empty: it has no array.")
        for path, leaf in paths:
            check_rows(path, leaf)
        leaves = [leaf for _, leaf in paths]
        missing = [-leaf.shape[0] % self._multiple for leaf in leaves]
        if any(missing):
            self._check_padding(paths, tree, whole)
        return leaves, missing, tree

    def _put(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.core.Tracer):
            return _jax.constrained(leaf, self._sharding)
        return put(leaf, self._sharding)

    @property
    def _pieces(self) -> str:
        number = self._multiple // self._parts
        return f"{self._parts} shards" + (f" of {number} microbatches" if number > 1 else "")

    def _check_padding(self, paths: list[Any], tree: Any, whole: dict[str, Any]) -> None:
        parts = self._multiple
        path, leaf = next((path, leaf) for path, leaf in paths if leaf.shape[0] % parts)
        if self._weight is None:
            rows, rest = leaf.shape[0], leaf.shape[0] % parts
            fewer = f"{rows - rest} or " if rows > parts else ""
            or_weight = (
                ", or weight=, the batch's entry that counts examples: the batch is then padded "
                "with rows of weight 0."
            )
            raise ArgumentError(
                f"batch{jax.tree_util.keystr(path)} has {rows} rows, which do not divide evenly "
                f"over {self._pieces}: {rest} are left over. Pass {fewer}{rows - rest + parts}"
                f"{or_weight if self._takes_weight else '.'}"
            )
        check_same_rows(paths)
        key = tree, tuple((leaf.shape, str(leaf.dtype)) for _, leaf in paths)
        if key in self._padding_weighs_nothing:
            return
        # Otherwise the padding would silently change the mean.
        each = math.ceil(leaf.shape[0] / parts)
        nothing = tree.unflatten([_padding(x, each) for _, x in paths])
        weight = float(weight_of(self._weight, join_entries(nothing, whole)))
        if weight != 0:
            raise ArgumentError(
                f"A batch of {leaf.shape[0]} rows is padded with rows of zeros to divide over "
                f"{self._pieces}, and these must have weight 0, but weight returns {weight:g} for "
                f"{each} of them. Add a mask to the batch and pass its name as weight."
            )
        self._padding_weighs_nothing.add(key)


def _padding(leaf: Any, rows: int) -> Any:
    """Rows of zeros; for PRNG keys, copies of the first row."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(leaf[:1], (rows, *leaf.shape[1:]))
    return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)


def _padded(leaf: Any, rows: int) -> Any:
    together = jnp.concatenate if isinstance(leaf, jax.Array) else np.concatenate
    return together([leaf, _padding(leaf, rows)])
