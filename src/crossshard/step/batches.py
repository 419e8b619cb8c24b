"""Batches: which arrays of one are split, its checks, and how it is padded and put on the mesh."""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _check, _jax, _mesh
from crossshard._check import is_number
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError, ArgumentTypeError, CrossshardError
from crossshard.model.model_state import ModelState
from crossshard.model.state import FlatState, TrainState, is_unread, names_of
from crossshard.shards.batch_axes import (
    BatchAxes,
    VirtualShards,
    check_batch_axis,
    join,
    resized,
    spec_along,
    take_rows,
)
from crossshard.shards.devices import number_of_shards, own_shards, put
from crossshard.step.losses.loss import StepLoss
from crossshard.step.microbatches import AuxReduction, SumOf, Weight, entries_read, weight_of

# Rows that lie on a mesh with room for a further virtual shard on some shards, by their ids.
_UNEVEN: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def is_uneven(leaf: Any) -> bool:
    """Return whether rows were put on a mesh with room that is not theirs."""
    return _UNEVEN.get(id(leaf)) is leaf


def check_entries(batch_axis: Any, names: Any, weight: Weight | None) -> BatchAxes:
    """Return the axes of a batch's rows, given ``batch_axis`` and ``replicated_entries``."""
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


def check_same_rows(rows: Any, axes: BatchAxes) -> None:
    """Raise unless all arrays of a batch that are split have the same number of rows.

    Otherwise each shard would get a part of, say, a table.
    """
    lengths = axes.lengths(rows)
    for place, length in enumerate(lengths):
        if length == lengths[0]:
            continue
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
        names, along = [jax.tree_util.keystr(paths[i]) for i in (0, place)], axes.of(rows)
        few, many = sorted([lengths[0], length])
        each, odd = divmod(many, few or 1)
        of_each = (
            f" If {each} of one belong to each of the other, reshape it to [{few}, {each}, …]."
        )
        raise ArgumentError(
            f"All arrays of a batch must have as many rows, since each is split over the shards, "
            f"here along axes {along[0]} and {along[place]}; got "
            f"{[few, many]}: batch{names[0]} has {lengths[0]}, and batch{names[1]} {length}. Write "
            f"the axes of the rows in batch_axis=; or, if every shard gets an entry whole, such as "
            f"a table, its name in replicated_entries=.{of_each * (not odd and few > 0)}"
        )


def _sequence_of_numbers(path: Any, paths: Sequence[tuple[Any, Any]]) -> str:
    """Return the name of the outermost list or tuple around a leaf, if it has numbers alone."""
    around = path
    while around and isinstance(around[-1], jax.tree_util.SequenceKey):
        around = around[:-1]
    inside = [np.shape(leaf) for other, leaf in paths if other[: len(around)] == around]
    return "" if around == path or any(inside) else f"batch{jax.tree_util.keystr(around)}"


def check_batches(batches: Any) -> None:
    """Raise unless this is an iterable of batches, and not a single one."""
    is_one = isinstance(batches, dict | str | bytes) or hasattr(batches, "dtype")
    if is_one or not isinstance(batches, Iterable):
        raise ArgumentTypeError(
            f"batches is an iterable of batches; got {type(batches).__name__}. Write [batch] for a "
            f"single one."
        )


class BatchPlacer:
    """Puts the batches of a loss on a mesh: rows split over the shards in order, the rest whole.

    Attributes:
      number: the number of shards.
      parts: how many of them have the rows that this process passes.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], loss: StepLoss):
        self.mesh, self.axes, self.batch_axes = mesh, axes, loss.batch_axes
        self.number: int = number_of_shards(mesh, axes)
        self._own = own_shards(NamedSharding(mesh, PartitionSpec(axes)), self.number)
        self.parts: int = len(self._own)
        self._virtual = VirtualShards(loss.parts(self.number), self.number)
        self._loss, self._weight = loss, loss.weight_fn
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._shardings: dict[int, NamedSharding] = {}
        # The shardings and dimensions of batches that were on the devices already.
        self._known: dict[Any, list[tuple[NamedSharding, int]]] = {}
        # The kinds of batches whose padding weighs nothing, and those that all processes passed.
        self._padded: set[Any] = set()
        # Of these, which entries are filled up with zeros, and not with copies of a row.
        self._zeros: dict[Any, Any] = {}
        self._agreed: set[Any] = set()
        # The kinds of batches that a call has put on the devices of several processes.
        self._placed: set[Any] = set()

    @property
    def takes_any_rows(self) -> bool:
        """Whether the rows are counted, so that each process may pass another number of them."""
        loss = self._loss
        # A batch has one count for all rows, and averages over the shards count these alike.
        averages = AuxReduction.MEAN in jax.tree.leaves(loss.aux_reduction)
        averages |= loss.model_state is ModelState.MEAN or loss.over_batch
        return self._weight is not None or (loss.record.returns_mean and not averages)

    def along(self, axis: int) -> NamedSharding:
        """Return the sharding of an array that is split along an axis."""
        if axis not in self._shardings:
            self._shardings[axis] = NamedSharding(self.mesh, spec_along(axis, self.axes))
        return self._shardings[axis]

    def is_placed(self, leaf: Any, axis: int) -> bool:
        """Return whether an array is split along an axis already."""
        if not self._virtual.is_even:
            # The caller would have split it evenly.
            return is_uneven(leaf)
        return getattr(leaf, "sharding", None) == self.along(axis)

    def split(self, batch: Any, *, or_types: bool = False) -> tuple[Any, Any]:
        """Split a batch, or its types, into arrays with rows and whole arrays."""
        rows, whole = self.batch_axes.split(batch)
        _check.arrays("batch", whole, or_types=or_types)
        # A Python number would be compiled into the program.
        return rows, jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), whole)

    def abstract(self, batch: Any) -> Any:
        """Return the types and shardings of a batch on the mesh; raises as for the batch itself."""
        self._loss.record.pads = self._loss.record.pads_copies = False

        def one(leaf: Any, axis: int | None = None) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            if axis is None:
                return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=self._everywhere)
            rows = self._length_with_room(leaf, axis, self.number)
            rows = leaf.shape[axis] if self.is_placed(leaf, axis) else rows
            shape = resized(leaf.shape, axis, rows)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.along(axis))

        rows, whole = self.split(batch, or_types=True)
        self._check(rows, whole, or_types=True)
        placed = jax.tree.map(one, rows, self.batch_axes.tree_of(rows))
        return join(placed, jax.tree.map(one, whole))

    def __call__(self, batch: Any) -> Any:
        """Put a batch on the devices; arrays with the right sharding are returned unchanged.

        If there are several processes, each passes its own rows, and all of them the same whole
        entries.
        """
        self._loss.record.pads = self._loss.record.pads_copies = False
        leaves, tree = jax.tree.flatten(batch)
        # A fast check, since it runs at every step; a tracer has no such attribute.
        known = self._known.get(tree)
        is_as = lambda x, to: getattr(x, "sharding", None) == to[0] and x.ndim == to[1]
        if known and all(map(is_as, leaves, known)):
            return batch
        rows, whole = self.split(batch)
        placed = self.place_whole(whole)
        leaves, axes = jax.tree.leaves(rows), self.batch_axes.of_rows(rows)
        if leaves and all(map(self.is_placed, leaves, axes)):
            if whole is None and self._virtual.is_even:
                self._known[tree] = [
                    (self.along(axis), x.ndim) for x, axis in zip(leaves, axes, strict=True)
                ]
            return join(rows, placed)
        # The caller asks to move the batch, and padding is a part of that.
        with jax.transfer_guard("allow"):
            if not _jax.at_top_level():
                return join(self._place(rows, whole), placed)
            rows = jax.tree.map(lambda leaf: _mesh.on_mesh(leaf, None), rows)
            with _mesh.in_place_of_the_users_mesh(_mesh.with_automatic_axes(self.mesh)):
                return join(self._place(rows, whole), placed)

    def own_rows(self, rows: int) -> np.ndarray:
        """Return the places of this process's rows among those of all processes."""
        virtual, microbatches = self._virtual, self._loss.accumulate_steps
        rows = _check.whole_number("rows", rows)
        pieces = virtual.number * microbatches
        if rows % pieces:
            kind = "shards" if self._loss.virtual_shards is None else "virtual shards"
            raise ArgumentError(
                f"{rows} rows do not divide over {virtual.number} {kind}"
                f"{f' of {microbatches} microbatches' * (microbatches > 1)}. Pass a multiple of "
                f"{pieces}; with weight=, fill the batch with rows of weight 0."
            )
        first = lambda shard: virtual.first(shard) * (rows // virtual.number)
        return np.concatenate([np.arange(first(own), first(own + 1)) for own in self._own])

    def number_of_rows(self, batch: Any) -> int:
        """Return the rows of all processes, given those of this one, or their types."""
        rows, _ = self.split(batch, or_types=True)
        self.check_rows(rows, or_types=True)
        leaf, axis = jax.tree.leaves(rows)[0], self.batch_axes.of_rows(rows)[0]
        pieces = self._loss.parts(self.number) * self._loss.accumulate_steps
        return int(leaf.shape[axis] * pieces // self._multiple(leaf))

    def ahead(self) -> Callable[[Any], Any]:
        """Return what puts the rows of one batch after the other on the devices, in any thread.

        It leaves to the call that takes the batch what that would refuse, pad, compile for, or
        compare with other processes. ``evaluate`` pads a batch with fewer rows than one before.
        """
        longest = 0

        def place(batch: Any) -> Any:
            nonlocal longest
            batch = copied(batch)
            try:
                rows, whole = self.batch_axes.split(batch)
                self.check_rows(rows)
            except CrossshardError:
                return batch
            leaves, axes = jax.tree.leaves(rows), self.batch_axes.of_rows(rows)
            number, before = leaves[0].shape[axes[0]], longest
            longest = max(longest, number)
            is_ready = self._virtual.is_even and all(type(x) is np.ndarray for x in leaves)
            if not is_ready or number < before or any(map(self._missing, leaves, axes)):
                return batch
            if self.parts < self.number and _kind(rows) not in self._placed:
                return batch
            with jax.transfer_guard("allow"):
                put_rows = lambda x, axis: put(x, self.along(axis))
                return join(jax.tree.map(put_rows, rows, self.batch_axes.tree_of(rows)), whole)

        return place

    def rows_of(self, batch: Any) -> str:
        """Describe what this process passes, for the others: with weights, any number of rows."""
        words = []
        for leaf, axis in zip(jax.tree.leaves(batch), self.batch_axes.of(batch), strict=True):
            sizes: list[Any] = list(np.shape(leaf))
            if axis is not None and sizes:
                if self.is_placed(leaf, axis):
                    sizes[axis] = sizes[axis] * self.parts // self.number
                elif not self._virtual.is_even:
                    sizes[axis] = self._length_with_room(leaf, axis, self.parts)
                sizes[axis] = "any" if self.takes_any_rows else sizes[axis]
            words.append(f"{dtype_on_device(leaf)}[{','.join(map(str, sizes))}]")
        return ",".join(words)

    def place_whole(self, whole: Any) -> Any:
        """Put the replicated arrays of a batch on the devices.

        If there are several processes, the arrays are compared when their shapes are new.
        """
        if not any(map(_is_traced, jax.tree.leaves(whole))):
            self._check_agreement(
                whole,
                checksum,
                "Every process must pass the same entries of replicated_entries, or of None in "
                "batch_axis.",
            )
        as_is = lambda x: getattr(x, "sharding", None) == self._everywhere
        return jax.tree.map(lambda x: x if as_is(x) else self._put(x, self._everywhere), whole)

    def _place(self, rows: Any, whole: Any) -> Any:
        self._check(rows, whole)
        axes = self.batch_axes.tree_of(rows)
        record, key = self._loss.record, _kind(rows)
        record.pads_copies = record.pads and not record.counts_copies
        if record.pads_copies and key not in self._zeros:
            self._zeros[key] = zeros_in_padding(self._loss, rows, whole)
        zeros = self._zeros[key] if record.pads_copies else jax.tree.map(lambda _: True, rows)
        rows = jax.tree.map(self._filled, rows, axes, zeros)
        if self.parts < self.number and not self.takes_any_rows:
            or_weight = ", or pass weight=, or return a Mean and pad with rows that do not count"
            self._check_agreement(
                rows,
                lambda leaf: f"{leaf.dtype}{list(leaf.shape)}",
                "Every process must pass arrays of the same dtypes. The mean over the shards is "
                f"that over all rows only if all pass as many rows: pass as many"
                f"{'' if self._loss.over_batch else or_weight}.",
            )
        if self.parts < self.number:
            self._placed.add(_kind(rows))
        placed = jax.tree.map(lambda x, axis: self._put(x, self.along(axis)), rows, axes)
        if not self._virtual.is_even:
            _UNEVEN.update((id(x), x) for x in jax.tree.leaves(placed) if not _is_traced(x))
        return placed

    def _shards_of(self, leaf: Any) -> Sequence[int]:
        """Return the shards whose rows an array has: those of this process, or all."""
        is_of_all = _is_traced(leaf) or not getattr(leaf, "is_fully_addressable", True)
        return range(self.number) if is_of_all else self._own

    def _multiple(self, leaf: Any) -> int:
        """Return by what the rows of an array must divide: the microbatches of its shards."""
        of_shards = sum(map(self._virtual.count, self._shards_of(leaf)))
        return int(of_shards * self._loss.accumulate_steps)

    def _length_with_room(self, leaf: Any, axis: int, shards: int) -> int:
        """Return the number of rows for which so many shards have room, given an array of rows."""
        of_piece = math.ceil(leaf.shape[axis] / self._multiple(leaf))
        return of_piece * self._loss.pieces(self.number) * shards

    def _filled(self, x: Any, axis: int, zeros: bool) -> Any:
        """Fill rows up until they divide; repeat some if virtual shards do not."""
        x = padded(x, axis, x.shape[axis] + self._missing(x, axis), zeros=zeros)
        if self._virtual.is_even:
            return x
        # Each shard gets as many. It skips those after its own, here copies of its last.
        places, before = list[int](), 0
        for own in map(self._virtual.count, self._shards_of(x)):
            places += [before + min(nth, own - 1) for nth in range(self._virtual.most)]
            before += own
        each = x.shape[axis] // before
        rows = (np.asarray(places)[:, None] * each + np.arange(each)).ravel()
        xp: Any = jnp if isinstance(x, jax.Array) else np
        return xp.take(x, rows, axis)

    @staticmethod
    def _put(x: Any, to: NamedSharding) -> jax.Array:
        return _mesh.constrained(x, to) if _is_traced(x) else put(x, to)

    def _check_agreement(self, tree: Any, shown: Callable[[Any], str], mend: str) -> None:
        """Raise unless ``shown`` says the same of every process's leaves; once for each kind."""
        paths = jax.tree_util.tree_leaves_with_path(tree)
        key = mend, _kind(tree)
        if not paths or key in self._agreed:
            return
        name = lambda path: f"batch{jax.tree_util.keystr(path)}"
        given = lambda: {name(path): shown(leaf) for path, leaf in paths}
        check_agreement("step", given, self.mesh, mend)
        self._agreed.add(key)

    def check_rows(self, rows: Any, *, or_types: bool = False) -> None:
        """Raise unless a batch without its whole arrays has some, all of them with rows."""
        paths = jax.tree_util.tree_leaves_with_path(rows)
        if not paths:
            raise ArgumentError("The batch is empty: it has no array that is split.")
        for (path, leaf), axis in zip(paths, self.batch_axes.of_rows(rows), strict=True):
            where = f"batch{jax.tree_util.keystr(path)}"
            if is_number(leaf) and not np.shape(leaf):
                advice = (
                    "Name it in replicated_entries, or write None for it in batch_axis, so that "
                    "every shard gets it whole."
                )
                if sequence := _sequence_of_numbers(path, paths):
                    advice = f"Write numpy.asarray({sequence}): of a list, each element is a leaf."
                raise ArgumentError(
                    f"{where} is a scalar, which has no rows to split over the shards. {advice}"
                )
            _check.array(where, leaf, or_type=or_types)
            if not leaf.shape[axis]:
                raise ArgumentError(f"{where} has 0 rows, which have no mean. Leave it out.")

    def _check(self, rows: Any, whole: Any, *, or_types: bool = False) -> None:
        """Raise unless each array has rows that can be split, or padded."""
        self.check_rows(rows, or_types=or_types)
        paths = jax.tree_util.tree_leaves_with_path(rows)
        for (path, leaf), axis in zip(paths, self.batch_axes.of_rows(rows), strict=True):
            if self._missing(leaf, axis):
                self._check_padding(path, leaf, axis, rows, whole)
                break

    def _missing(self, leaf: Any, axis: int) -> int:
        """Return how many rows of padding an array needs."""
        return int(-leaf.shape[axis] % self._multiple(leaf))

    def _check_padding(self, path: Any, leaf: Any, axis: int, rows: Any, whole: Any) -> None:
        check_same_rows(rows, self.batch_axes)
        number, parts = leaf.shape[axis], self._multiple(leaf)
        microbatches = self._loss.accumulate_steps
        kind = "shards" if self._loss.virtual_shards is None else "virtual shards"
        pieces = f"{parts // microbatches} {kind}"
        pieces += f" of {microbatches} microbatches" * (microbatches > 1)
        if self._weight is None:
            rest = number % parts
            fewer = f"{number - rest} or " if number > parts else ""
            # A loss over the batch takes no weight.
            or_weight = (
                ", or weight=, the batch's entry that counts examples: the batch is then padded "
                "with rows of weight 0. A loss that returns a Mean takes no weight=: pad its batch "
                "with rows that do not count"
            )
            raise ArgumentError(
                f"batch{jax.tree_util.keystr(path)} has {number} rows, which do not divide evenly "
                f"over {pieces}: {rest} are left over. Pass {fewer}{number - rest + parts}"
                f"{'' if self._loss.over_batch else or_weight}."
            )
        leaves, tree = jax.tree.flatten(rows)
        key = tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        self._loss.record.pads = True
        self._loss.record.check_padding()
        if key in self._padded:
            return
        # Otherwise the padding would silently change the mean.
        each = math.ceil(number / parts)
        nothing = lambda x, axis: _padding(x, axis, each, zeros=True)
        padding = jax.tree.map(nothing, rows, self.batch_axes.tree_of(rows))
        weight = float(weight_of(self._weight, join(padding, whole)))
        if weight != 0:
            raise ArgumentError(
                f"A batch of {number} rows is padded with rows of zeros to divide over "
                f"{pieces}, and these must have weight 0, but weight returns {weight:g} for "
                f"{each} of them. Add a mask to the batch and pass its name as weight."
            )
        self._padded.add(key)


def _kind(tree: Any) -> Any:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return tuple((path, leaf.shape, str(leaf.dtype)) for path, leaf in paths)


def dtype_on_device(leaf: Any) -> Any:
    """Return the dtype that an array has, or will have, on a device; empty if it has none."""
    dtype: Any = getattr(leaf, "dtype", "")
    is_known = isinstance(leaf, np.ndarray) and dtype.kind in "biufc"
    return jax.dtypes.canonicalize_dtype(dtype) if is_known else dtype


def copied(batch: Any) -> Any:
    """Copy the arrays of numpy in a batch, which its loader may fill again before they are read.

    On CPUs the array of a device may be the memory of numpy itself.
    """
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def zeros_in_padding(loss: StepLoss, rows: Any, whole: Any) -> Any:
    """Return of each array of a batch whether padding is zeros in it, or copies of its first row.

    Zeros are in what the weight reads. All else has copies, of which a logarithm or a norm is as
    finite as of the row; unless the trace does not show that these count nothing.
    """
    leaves, tree = jax.tree.flatten(rows)
    copies = loss.weight_fn is not None and not loss.record.counts_copies
    is_read = entries_read(loss.weight_fn, rows, whole) if copies else [True] * len(leaves)
    return tree.unflatten(is_read)


def padded(leaf: Any, axis: int, number: int, *, zeros: bool = False) -> Any:
    """Pad an array to ``number`` rows, with copies of the first or with zeros."""
    missing = number - leaf.shape[axis]
    if not missing:
        return leaf
    xp: Any = jnp if isinstance(leaf, jax.Array) else np
    return xp.concatenate([leaf, _padding(leaf, axis, missing, zeros=zeros)], axis)


def _padding(leaf: Any, axis: int, rows: int, *, zeros: bool) -> Any:
    shape = resized(leaf.shape, axis, rows)
    # PRNG keys have no zeros.
    if zeros and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return np.zeros(shape, leaf.dtype)
    xp: Any = jnp if isinstance(leaf, jax.Array) else np
    return xp.broadcast_to(take_rows(leaf, axis, slice(1)), shape)


class Donation:
    """Refuses a batch that shares a buffer with the state, which would crash the interpreter.

    It runs before every step. Only somebody who has read the trees of a state can pass an array of
    them, and an array of the batch is compared only with those of the same type on a device.
    """

    def __init__(self) -> None:
        self._skeleton: Any = None
        self._alike: dict[Any, list[int]] = {}

    def check(self, state: TrainState, batch: Any) -> None:
        """Raise if an array of a batch is, or shares its buffer with, an array of a state."""
        unread = is_unread(state)
        pieces = [
            (place, leaf.addressable_data(0))
            for place, leaf in enumerate(jax.tree.leaves(batch))
            if isinstance(leaf, jax.Array)
            and not leaf.is_deleted()
            and (leaf.shape == () or not unread)
        ]
        if not pieces:
            return
        if self._skeleton is not state.skeleton:
            self._note(state)
        # What a step has returned has its count, which is the first leaf, beside the trees.
        kinds = {(piece.shape, piece.dtype) for _, piece in pieces}
        alike = [0] if unread else itertools.chain(*(self._alike.get(kind, ()) for kind in kinds))
        leaves = FlatState.of(state).leaves
        owners = {buffer: place for place in alike for buffer in _buffers(leaves[place])}
        for place, piece in pieces:
            (buffer,) = _buffers(piece)
            if buffer in owners:
                path, _ = jax.tree_util.tree_leaves_with_path(batch)[place]
                raise ArgumentError(
                    f"batch{jax.tree_util.keystr(path)} shares its buffer with "
                    f"state.{names_of(state)[owners[buffer]]}, and the step donates the state: it "
                    f"would overwrite what it reads. Pass jnp.copy(...) of it, or write "
                    f"make_train_step(..., donate=False), with memory for two states."
                )

    def _note(self, state: TrainState) -> None:
        """Remember which leaves of such states have which type on a device."""
        self._alike = {}
        for place, leaf in enumerate(FlatState.of(state).leaves):
            if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                kind = leaf.sharding.shard_shape(leaf.shape), leaf.dtype
                self._alike.setdefault(kind, []).append(place)
        self._skeleton = state.skeleton


def _buffers(x: Any) -> list[tuple[int, Any]]:
    """Return where the parts of an array lie: the address and the device of each."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return []
    parts = map(x.addressable_data, range(len(x.sharding.addressable_devices)))
    return [(part.unsafe_buffer_pointer(), *part.devices()) for part in parts]
