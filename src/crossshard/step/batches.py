"""Puts batches on the mesh: split along their rows, padded if there are weights; some whole."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax, _mesh
from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError
from crossshard.shards.batch_axes import BatchAxes, join, resized, spec_along, take_rows
from crossshard.shards.mesh import number_of_shards
from crossshard.shards.put import own_parts, put
from crossshard.step.arguments import check_rows, check_same_rows
from crossshard.step.entries import WholeEntries
from crossshard.step.weight import Weight, weight_of


class BatchPlacer:
    """Puts batches on the devices of a mesh, rows split over the shards in order.

    Args:
      mesh: the mesh.
      axes: its shard axes.
      weight: the weight function; ``None`` if all shards count the same.
      of_batch: along which axes the arrays of a batch are split.
      microbatches: the number of pieces of a shard's rows, or a virtual one's.
      virtual_shards: how many virtual shards there are; ``None`` without them.
      takes_weight: whether the step could be given a weight, so that errors may speak of it.
    """

    def __init__(
        self,
        mesh: Mesh,
        axes: tuple[str, ...],
        weight: Weight | None,
        of_batch: BatchAxes,
        microbatches: int = 1,
        *,
        virtual_shards: int | None = None,
        takes_weight: bool = True,
    ):
        self._number = number_of_shards(mesh, axes)
        self._parts = own_parts(NamedSharding(mesh, PartitionSpec(axes)), self._number)
        # Rows are split over the shards, and a shard's rows into microbatches.
        self._of_each = microbatches
        self._is_virtual = virtual_shards is not None
        self._multiple = (
            self._parts * (virtual_shards or self._number) // self._number * microbatches
        )
        self._mesh = mesh
        self._axes = axes
        self._of_batch = of_batch
        self._shardings: dict[int, NamedSharding] = {}
        self._weight = weight
        self._takes_weight = takes_weight
        self._whole = WholeEntries(mesh, of_batch)
        # How the arrays of batches were that were on the devices already.
        self._known: dict[Any, list[tuple[NamedSharding, int]]] = {}
        self._padding_weighs_nothing: set[Any] = set()
        self._agreed: set[Any] = set()

    def abstract(self, batch: Any) -> Any:
        """The types and shardings of a batch on the mesh; raises as for the batch itself."""

        def one(leaf: Any, axis: int) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            rows = (leaf.shape[axis] + self._missing(leaf, axis)) * self._number // self._parts
            rows = leaf.shape[axis] if self._is_placed(leaf, axis) else rows
            shape = resized(leaf.shape, axis, rows)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._along(axis))

        rows, whole = self._whole.split(batch, or_types=True)
        self._check(rows, whole, or_types=True)
        return join(self._of_batch.map(one, rows), self._whole.abstract(whole))

    def __call__(self, batch: Any) -> Any:
        """Put a batch on the devices; arrays with the right sharding are returned unchanged.

        If there are several processes, each passes its own rows, and all of them the same whole
        entries.

        Raises:
          ArgumentError: an array has no rows, or rows that do not divide and may not be padded.
          ArgumentTypeError: a leaf is not an array.
        """
        leaves, tree = jax.tree.flatten(batch)
        # A fast check, since it runs at every step; a tracer has no such attribute.
        known = self._known.get(tree)
        if known and all(map(_lies_as, leaves, known)):
            return batch
        rows, whole = self._whole.split(batch)
        placed = self._whole.place(whole)
        leaves, axes = jax.tree.leaves(rows), self._of_batch.of_rows(rows)
        if leaves and all(map(self._is_placed, leaves, axes)):
            if whole is None:
                self._known[tree] = [
                    (self._along(axis), x.ndim) for x, axis in zip(leaves, axes, strict=True)
                ]
            return join(rows, placed)
        # To move a batch is asked for, and padding is a part of it.
        with jax.transfer_guard("allow"):
            if not _jax.at_top_level():
                return join(self._place(rows, whole), placed)
            rows = jax.tree.map(lambda leaf: _mesh.on_mesh(leaf, None), rows)
            with _mesh.in_place_of_the_users_mesh(_mesh.with_automatic_axes(self._mesh)):
                return join(self._place(rows, whole), placed)

    def rows_of(self, batch: Any) -> str:
        """What this process passes, as it tells the others: with weights, of any number of rows."""
        words = []
        for leaf, axis in zip(jax.tree.leaves(batch), self._of_batch.of(batch), strict=True):
            sizes: list[Any] = list(np.shape(leaf))
            if axis is not None and sizes:
                if self._is_placed(leaf, axis):
                    sizes[axis] = sizes[axis] * self._parts // self._number
                sizes[axis] = "any" if self._weight else sizes[axis]
            words.append(f"{getattr(leaf, 'dtype', '')}[{','.join(map(str, sizes))}]")
        return ",".join(words)

    def _place(self, rows: Any, whole: Any) -> Any:
        self._check(rows, whole)
        if self._parts < self._number and self._weight is None:
            self._check_agreement(rows)
        return self._of_batch.map(self._placed, rows)

    def _check_agreement(self, batch: Any) -> None:
        """Raise unless every process passes as many rows."""
        given = {
            f"batch{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        }
        key = tuple(given.items())
        if key in self._agreed:
            return
        or_weight = ", or pass weight=, the batch's entry that counts rows"
        check_agreement(
            "step",
            lambda: given,
            self._mesh,
            "Every process must pass arrays of the same dtypes. The mean over the shards is that "
            "over all rows only if all pass as many rows: pass as many"
            f"{or_weight if self._takes_weight else ''}.",
        )
        self._agreed.add(key)

    def _check(self, rows: Any, whole: Any, *, or_types: bool = False) -> None:
        """Raise unless each array has rows that can be split, or padded."""
        paths = jax.tree_util.tree_leaves_with_path(rows)
        axes = self._of_batch.of_rows(rows)
        if not paths:
            raise ArgumentError("The batch is empty: it has no array that is split.")
        for (path, leaf), axis in zip(paths, axes, strict=True):
            check_rows(path, leaf, axis, or_type=or_types)
        for (path, leaf), axis in zip(paths, axes, strict=True):
            if self._missing(leaf, axis):
                self._check_padding(path, leaf.shape[axis], rows, whole)
                break

    def _missing(self, leaf: Any, axis: int) -> int:
        """How many rows of padding an array needs."""
        return int(-leaf.shape[axis] % self._multiple)

    def _along(self, axis: int) -> NamedSharding:
        """The sharding of what is split along an axis."""
        if axis not in self._shardings:
            self._shardings[axis] = NamedSharding(self._mesh, spec_along(axis, self._axes))
        return self._shardings[axis]

    def _is_placed(self, leaf: Any, axis: int) -> bool:
        return getattr(leaf, "sharding", None) == self._along(axis)

    def _placed(self, leaf: Any, axis: int) -> jax.Array:
        """An array on the devices, padded."""
        if missing := self._missing(leaf, axis):
            together = jnp.concatenate if isinstance(leaf, jax.Array) else np.concatenate
            leaf = together([leaf, _padding(leaf, axis, missing)], axis)
        if isinstance(leaf, jax.core.Tracer):
            return _mesh.constrained(leaf, self._along(axis))
        return put(leaf, self._along(axis))

    @property
    def _pieces(self) -> str:
        number, kind = self._of_each, "virtual shards" if self._is_virtual else "shards"
        of = f" of {number} microbatches" if number > 1 else ""
        return f"{self._multiple // number} {kind}{of}"

    def _check_padding(self, path: Any, number: int, rows: Any, whole: Any) -> None:
        check_same_rows(rows, self._of_batch)
        parts = self._multiple
        if self._weight is None:
            rest = number % parts
            fewer = f"{number - rest} or " if number > parts else ""
            or_weight = (
                ", or weight=, the batch's entry that counts examples: the batch is then padded "
                "with rows of weight 0. A loss that returns a Mean takes rows of your own padding, "
                "whose count is 0."
            )
            raise ArgumentError(
                f"batch{jax.tree_util.keystr(path)} has {number} rows, which do not divide evenly "
                f"over {self._pieces}: {rest} are left over. Pass {fewer}{number - rest + parts}"
                f"{or_weight if self._takes_weight else '.'}"
            )
        leaves, tree = jax.tree.flatten(rows)
        key = tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if key in self._padding_weighs_nothing:
            return
        # Otherwise the padding would silently change the mean.
        each = math.ceil(number / parts)
        nothing = self._of_batch.map(lambda x, axis: _padding(x, axis, each), rows)
        weight = float(weight_of(self._weight, join(nothing, whole)))
        if weight != 0:
            raise ArgumentError(
                f"A batch of {number} rows is padded with rows of zeros to divide over "
                f"{self._pieces}, and these must have weight 0, but weight returns {weight:g} for "
                f"{each} of them. Add a mask to the batch and pass its name as weight."
            )
        self._padding_weighs_nothing.add(key)


def _lies_as(leaf: Any, known: tuple[NamedSharding, int]) -> bool:
    sharding, ndim = known
    return getattr(leaf, "sharding", None) == sharding and leaf.ndim == ndim


def _padding(leaf: Any, axis: int, rows: int) -> Any:
    """Rows of zeros; for PRNG keys, copies of the first row."""
    shape = resized(leaf.shape, axis, rows)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(take_rows(leaf, axis, slice(1)), shape)
    return np.zeros(shape, leaf.dtype)
