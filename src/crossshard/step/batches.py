"""Batches: what of one is split, its checks, and its way onto the mesh: padded, split or whole."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _check, _jax, _mesh
from crossshard._check import is_number
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.model.state import TrainState, names_of
from crossshard.shards.batch_axes import (
    BatchAxes,
    check_batch_axis,
    join,
    resized,
    spec_along,
    take_rows,
)
from crossshard.shards.devices import number_of_shards, own_parts, put
from crossshard.step.losses.rows import StepLoss
from crossshard.step.microbatches import SumOf, Weight, weight_of


def check_entries(batch_axis: Any, names: Any, weight: Weight | None) -> BatchAxes:
    """The checked ``batch_axis`` and ``replicated_entries`` arguments."""
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


def check_rows(path: Any, leaf: Any, axis: int, *, or_type: bool = False) -> None:
    """Raise unless a leaf of a batch is an array, or its type, with rows along an axis."""
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

    Else each shard would get a part of, say, a table.
    """
    lengths = axes.lengths(rows)
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


class BatchShardings:
    """Where the arrays of batches lie: rows split over the shards, whole ones on every device.

    Attributes:
      number: the number of shards.
      parts: how many of them have the rows that this process passes.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], of_batch: BatchAxes):
        self.mesh = mesh
        self.axes = axes
        self.of_batch = of_batch
        self.number: int = number_of_shards(mesh, axes)
        self.parts: int = own_parts(NamedSharding(mesh, PartitionSpec(axes)), self.number)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._shardings: dict[int, NamedSharding] = {}
        self._equal: set[Any] = set()

    def along(self, axis: int) -> NamedSharding:
        """The sharding of what is split along an axis."""
        if axis not in self._shardings:
            self._shardings[axis] = NamedSharding(self.mesh, spec_along(axis, self.axes))
        return self._shardings[axis]

    def is_placed(self, leaf: Any, axis: int) -> bool:
        """Whether an array is split along an axis already."""
        return getattr(leaf, "sharding", None) == self.along(axis)

    def split(self, batch: Any, *, or_types: bool = False) -> tuple[Any, Any]:
        """A batch, or its types, without its whole arrays, and with these alone."""
        rows, whole = self.of_batch.split(batch)
        _check.arrays("batch", whole, or_types=or_types)
        # A Python number would be a part of the program.
        return rows, jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), whole)

    def types_of_whole(self, whole: Any) -> Any:
        """The types and shardings of the arrays that every shard gets whole."""

        def one(x: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=self._everywhere)

        return jax.tree.map(one, whole)

    def place_whole(self, whole: Any) -> Any:
        """The arrays that every shard gets whole, on the devices.

        If there are several processes, the arrays are compared when their shapes are new.
        """
        leaves = jax.tree.leaves(whole)
        key = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        is_traced = lambda x: isinstance(x, jax.core.Tracer)
        if leaves and key not in self._equal and not any(map(is_traced, leaves)):
            check_agreement(
                "step",
                lambda: {
                    f"batch{jax.tree_util.keystr(path)}": checksum(leaf)
                    for path, leaf in jax.tree_util.tree_leaves_with_path(whole)
                },
                self.mesh,
                "Every process must pass the same entries of replicated_entries, or of None in "
                "batch_axis.",
            )
            self._equal.add(key)
        return jax.tree.map(self._put, whole)

    def _put(self, x: Any) -> jax.Array:
        if isinstance(x, jax.core.Tracer):
            return _mesh.constrained(x, self._everywhere)
        return x if getattr(x, "sharding", None) == self._everywhere else put(x, self._everywhere)


class BatchPlacer:
    """Puts the batches of a loss on a mesh, rows split over the shards in order."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], loss: StepLoss):
        self._where = where = BatchShardings(mesh, axes, loss.batch_axes)
        # Rows are split over the shards, and a shard's rows into microbatches.
        self._multiple = where.parts * loss.pieces(where.number)
        self._loss, self._of_batch, self._weight = loss, loss.batch_axes, loss.weight
        # Errors speak of a weight where the step could be given one.
        self._takes_weight = not loss.has_one_state
        # How the arrays of batches were that were on the devices already.
        self._known: dict[Any, list[tuple[NamedSharding, int]]] = {}
        self._padding_weighs_nothing: set[Any] = set()
        self._agreed: set[Any] = set()

    def abstract(self, batch: Any) -> Any:
        """The types and shardings of a batch on the mesh; raises as for the batch itself."""

        def one(leaf: Any, axis: int) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            rows = (leaf.shape[axis] + self._missing(leaf, axis)) * where.number // where.parts
            rows = leaf.shape[axis] if where.is_placed(leaf, axis) else rows
            shape = resized(leaf.shape, axis, rows)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=where.along(axis))

        where = self._where
        rows, whole = where.split(batch, or_types=True)
        self._check(rows, whole, or_types=True)
        placed = jax.tree.map(one, rows, self._of_batch.tree_of(rows))
        return join(placed, where.types_of_whole(whole))

    def __call__(self, batch: Any) -> Any:
        """Put a batch on the devices; arrays with the right sharding are returned unchanged.

        If there are several processes, each passes its own rows, and all of them the same whole
        entries.
        """
        leaves, tree = jax.tree.flatten(batch)
        # A fast check, since it runs at every step; a tracer has no such attribute.
        known = self._known.get(tree)
        lies_as = lambda x, to: getattr(x, "sharding", None) == to[0] and x.ndim == to[1]
        if known and all(map(lies_as, leaves, known)):
            return batch
        where = self._where
        rows, whole = where.split(batch)
        placed = where.place_whole(whole)
        leaves, axes = jax.tree.leaves(rows), self._of_batch.of_rows(rows)
        if leaves and all(map(where.is_placed, leaves, axes)):
            if whole is None:
                self._known[tree] = [
                    (where.along(axis), x.ndim) for x, axis in zip(leaves, axes, strict=True)
                ]
            return join(rows, placed)
        # To move a batch is asked for, and padding is a part of it.
        with jax.transfer_guard("allow"):
            if not _jax.at_top_level():
                return join(self._place(rows, whole), placed)
            rows = jax.tree.map(lambda leaf: _mesh.on_mesh(leaf, None), rows)
            with _mesh.in_place_of_the_users_mesh(_mesh.with_automatic_axes(where.mesh)):
                return join(self._place(rows, whole), placed)

    def rows_of(self, batch: Any) -> str:
        """What this process passes, as it tells the others: with weights, of any number of rows."""
        where, words = self._where, []
        for leaf, axis in zip(jax.tree.leaves(batch), self._of_batch.of(batch), strict=True):
            sizes: list[Any] = list(np.shape(leaf))
            if axis is not None and sizes:
                if where.is_placed(leaf, axis):
                    sizes[axis] = sizes[axis] * where.parts // where.number
                sizes[axis] = "any" if self._weight else sizes[axis]
            words.append(f"{getattr(leaf, 'dtype', '')}[{','.join(map(str, sizes))}]")
        return ",".join(words)

    def _place(self, rows: Any, whole: Any) -> Any:
        self._check(rows, whole)
        if self._where.parts < self._where.number and self._weight is None:
            self._check_agreement(rows)
        return jax.tree.map(self._placed, rows, self._of_batch.tree_of(rows))

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
            self._where.mesh,
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

    def _placed(self, leaf: Any, axis: int) -> jax.Array:
        """An array on the devices, padded."""
        if missing := self._missing(leaf, axis):
            together = jnp.concatenate if isinstance(leaf, jax.Array) else np.concatenate
            leaf = together([leaf, _padding(leaf, axis, missing)], axis)
        if isinstance(leaf, jax.core.Tracer):
            return _mesh.constrained(leaf, self._where.along(axis))
        return put(leaf, self._where.along(axis))

    def _check_padding(self, path: Any, number: int, rows: Any, whole: Any) -> None:
        check_same_rows(rows, self._of_batch)
        parts, microbatches = self._multiple, self._loss.accumulate_steps
        kind = "shards" if self._loss.same_bits is None else "virtual shards"
        pieces = f"{parts // microbatches} {kind}"
        pieces += f" of {microbatches} microbatches" * (microbatches > 1)
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
                f"over {pieces}: {rest} are left over. Pass {fewer}{number - rest + parts}"
                f"{or_weight if self._takes_weight else '.'}"
            )
        leaves, tree = jax.tree.flatten(rows)
        key = tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if key in self._padding_weighs_nothing:
            return
        # Otherwise the padding would silently change the mean.
        each = math.ceil(number / parts)
        padding = lambda x, axis: _padding(x, axis, each)
        nothing = jax.tree.map(padding, rows, self._of_batch.tree_of(rows))
        weight = float(weight_of(self._weight, join(nothing, whole)))
        if weight != 0:
            raise ArgumentError(
                f"A batch of {number} rows is padded with rows of zeros to divide over "
                f"{pieces}, and these must have weight 0, but weight returns {weight:g} for "
                f"{each} of them. Add a mask to the batch and pass its name as weight."
            )
        self._padding_weighs_nothing.add(key)


def _padding(leaf: Any, axis: int, rows: int) -> Any:
    """Rows of zeros; for PRNG keys, copies of the first row."""
    shape = resized(leaf.shape, axis, rows)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.broadcast_to(take_rows(leaf, axis, slice(1)), shape)
    return np.zeros(shape, leaf.dtype)


class Donation:
    """Refuses a batch with a buffer of the state, which would end the interpreter.

    It runs before every step, so the arrays of the state are compared only with those of the batch
    that have the same type on a device.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._skeleton: Any = None
        self._alike: dict[Any, list[int]] = {}

    def check(self, state: TrainState, batch: Any) -> None:
        """Raise if an array of a batch is, or shares its buffer with, an array of a state."""
        pointers: dict[Any, dict[int | None, int]] = {}
        for place, leaf in enumerate(jax.tree.leaves(batch)):
            if not isinstance(leaf, jax.Array) or leaf.is_deleted():
                continue
            piece = leaf.addressable_data(0)
            if self._skeleton is not state.skeleton:
                self._note(state)
            kind = piece.shape, piece.dtype
            if kind not in self._alike or not piece.devices() <= self._device_numbers.keys():
                continue
            (device,) = piece.devices()
            key = kind, self._device_numbers[device]
            if key not in pointers:
                pointers[key] = self._pointers(state, *key)
            other = pointers[key].get(piece.unsafe_buffer_pointer())
            if other is not None:
                path, _ = jax.tree_util.tree_leaves_with_path(batch)[place]
                raise ArgumentError(
                    f"batch{jax.tree_util.keystr(path)} shares its buffer with "
                    f"state.{names_of(state)[other]}, and the step donates the state: it would "
                    f"overwrite what it reads. Pass jnp.copy(...) of it, or write "
                    f"make_train_step(..., donate=False), with memory for two states."
                )

    def _note(self, state: TrainState) -> None:
        """Remember which leaves of such states have which type on a device."""
        own = jax.process_index()
        devices = [device for device in self._mesh.devices.flat if device.process_index == own]
        self._device_numbers = {device: number for number, device in enumerate(devices)}
        self._alike = {}
        for place, leaf in enumerate(jax.tree.leaves(state)):
            if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                kind = leaf.sharding.shard_shape(leaf.shape), leaf.dtype
                self._alike.setdefault(kind, []).append(place)
        self._skeleton = state.skeleton

    def _pointers(self, state: TrainState, kind: Any, number: int) -> dict[int | None, int]:
        """The addresses of the leaves of a type on a device, with their places."""
        leaves = jax.tree.leaves(state)

        def address(leaf: Any) -> int | None:
            if not isinstance(leaf, jax.Array) or number >= len(leaf.sharding.addressable_devices):
                return None
            return int(leaf.addressable_data(number).unsafe_buffer_pointer())

        return {address(leaves[place]): place for place in self._alike[kind]}
