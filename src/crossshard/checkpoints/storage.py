"""Storage: writes and reads a state's arrays with Orbax, in the shapes of model and optimizer."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from orbax.checkpoint import future

from crossshard import _mesh
from crossshard._hash import key_data
from crossshard.checkpoints.folder import ARRAYS, NOTES, Damaged, in_words
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.cut import Placement, partition_along_axis
from crossshard.shards.random_streams import is_key


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state."""

    # Where it is in the state, such as ``.params['w']``; of a typed key the dtype is ``key<…>``.
    path: str
    dtype: str
    # Its type on disk, unpadded, and how it is sharded when it is written and read: along an axis
    # that the shards divide, if there is one, to save memory.
    on_disk: jax.ShapeDtypeStruct
    # How it is sharded in the state.
    placement: Placement


def leaves_of(layout: StateLayout, state: TrainState, shards: int) -> list[Leaf]:
    """Return the leaves of a state, or of its types, as so many shards would write it."""
    found, placements = [], jax.tree.leaves(layout.placements(state))
    for (path, x), own in zip(jax.tree_util.tree_leaves_with_path(state), placements, strict=True):
        whole, number = _unpacked(own, x.shape, x.dtype), layout.number_of_shards
        shape = (shards, *whole.shape[1:]) if own.per_shard else whole.shape
        if not own.per_shard:
            split = partition_along_axis(shape, number, other_axes=own.other_axes)
            spec = split.spec(layout.axes)
        elif shards == number:
            spec = own.spec(layout.axes)
        else:
            spec = layout.of_other_shards(own, shape).spec
        sharding = NamedSharding(layout.mesh, spec)
        on_disk = jax.ShapeDtypeStruct(shape, whole.dtype, sharding=sharding)
        found.append(Leaf(jax.tree_util.keystr(path), str(x.dtype), on_disk, own))
    return found


def as_one(layout: StateLayout, leaf: Leaf) -> Leaf:
    """Return a leaf that each shard has as one for all of them."""
    shape, placement = leaf.on_disk.shape[1:], dataclasses.replace(leaf.placement, per_shard=False)
    split = partition_along_axis(shape, layout.number_of_shards, other_axes=placement.other_axes)
    sharding = NamedSharding(layout.mesh, split.spec(layout.axes))
    on_disk = jax.ShapeDtypeStruct(shape, leaf.on_disk.dtype, sharding=sharding)
    return dataclasses.replace(leaf, on_disk=on_disk, placement=placement)


# Cached, or a loop that saves would trace it for each leaf each time.
@functools.lru_cache(maxsize=4096)
def _unpacked(placement: Placement, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    # Without a sharding, which would not fit a mesh that the user has set.
    return jax.eval_shape(functools.partial(_unpack, placement), jax.ShapeDtypeStruct(shape, dtype))


def _unpack(placement: Placement, x: Any) -> Any:
    return key_data(placement.unpack(x))


def to_disk(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Return an array as it is on disk: itself if possible, else a copy."""
    copier = _copier_for(leaf, x)
    return x if copier is None else copier(x)


def compile_copies(layout: StateLayout, types: TrainState) -> None:
    """Begin to compile what copies a state of these types to disk, beside the first steps."""
    copies: dict[Any, None] = {}
    leaves = leaves_of(layout, types, layout.number_of_shards)
    for leaf, x in zip(leaves, jax.tree.leaves(types), strict=True):
        where = NamedSharding(layout.mesh, leaf.placement.spec(layout.axes))
        like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        copies[_copier_for(leaf, like), like] = None

    def compile_all() -> None:
        # The first save compiles what could not be, or tells why not.
        with contextlib.suppress(Exception), _mesh.in_place_of_the_users_mesh(layout.mesh):
            for copier, like in copies:
                # Python waits for this thread when it ends.
                if copier is not None and threading.main_thread().is_alive():
                    copier.lower(like).compile()

    threading.Thread(target=compile_all, name="crossshard").start()


def _copier_for(leaf: Leaf, x: Any) -> Any:
    """Return a function that is compiled and copies an array, or ``None`` where none is needed."""
    sharding, own = leaf.on_disk.sharding, leaf.placement
    # Each of several processes writes a part of an array, even if all of them have all of it.
    is_split_so = jax.process_count() == 1 or x.sharding.is_equivalent_to(sharding, x.ndim)
    if own.partition is not None and own.is_split:
        is_unpacked = own.groups is None and own.partition.axis is not None
    else:
        is_unpacked = not is_key(x)
    return None if is_split_so and is_unpacked else _copier(own, sharding)


# Cached, since most leaves of a model are alike, and to compile takes longer than to copy.
@functools.lru_cache(maxsize=4096)
def _copier(placement: Placement, sharding: NamedSharding) -> Any:
    return jax.jit(functools.partial(_unpack, placement), out_shardings=sharding)


def from_disk(like: Any, x: jax.Array) -> jax.Array:
    """Return an array from disk with the dtype of ``like``, or as a key of its implementation."""
    if x.dtype == like.dtype:
        return x
    if not is_key(like):
        return x.astype(like.dtype)
    found: list[Any] = []
    # JAX tells the implementation of a key, but not of a key's type.
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(x, impl=found[0])


# On disk.

# The bytes of one piece on disk, so that a device reads only its part of an array.
_PIECE = 16 << 20


class _NotesHandler(ocp.JsonCheckpointHandler):
    """Writes texts that a function returns, in the background and in the first process.

    One of them is the manifest, whose hashes are computed while the arrays are written.
    """

    async def async_save(self, directory: Any, args: "_Notes") -> list[Any]:
        """Begin; the files are there before the checkpoint is complete."""

        async def write() -> None:
            if jax.process_index() == 0:
                for name, text in args.files().items():
                    (directory / name).write_text(text)

        return [future.CommitFutureAwaitingContractedSignals(write(), name="crossshard")]


# Orbax knows no handler that only saves.
@ocp.args.register_with_handler(_NotesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _Notes(ocp.args.CheckpointArgs):
    files: Callable[[], dict[str, str]]


def checkpointer() -> ocp.AsyncCheckpointer:
    """Return what writes checkpoints in the background, each complete or not at all.

    It is not Orbax's ``CheckpointManager``: each save, deletion and restore of that begins at a
    barrier, where all processes wait for one that has failed, and it knows neither damaged
    checkpoints nor another writer.
    """
    # One device writes an array that several have, instead of each a slice, which would be a copy.
    of_arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, of_arrays))
    handlers = {
        ARRAYS: ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        NOTES: _NotesHandler(),
    }
    # Or threads that write would wait ten minutes, also at exit, for one that cannot make a folder.
    options = ocp.AsyncOptions(create_directories_asynchronously=False)
    composite = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(async_options=options), **handlers
    )
    return ocp.AsyncCheckpointer(composite, async_options=options)


def start(
    orbax: ocp.AsyncCheckpointer,
    folder: Path,
    arrays: list[jax.Array],
    notes: Callable[[], dict[str, str]],
) -> None:
    """Begin to write; every process calls it. The arrays may be donated once it returns.

    The notes are the manifest, and what stands beside it: texts by the names of their files.

    Orbax has the arrays on the host by then. An array on a CPU device is not copied there: JAX does
    not donate it as long as something holds its memory.
    """
    # Orbax refuses an array without elements.
    named = {str(place): array for place, array in enumerate(arrays) if array.size}
    pieces = dict.fromkeys(named, ocp.SaveArgs(chunk_byte_size=_PIECE))
    parts = {ARRAYS: ocp.args.PyTreeSave(named, pieces), NOTES: _Notes(notes)}
    orbax.save(folder, args=ocp.args.Composite(**parts))


def read(folder: Path, leaves: Mapping[int, Leaf], number: int) -> dict[int, jax.Array]:
    """Read arrays onto the mesh, by their places among so many; each process reads its parts.

    Those without elements are made, since they are not on disk.

    Raises:
      Damaged: an array is missing, has another type, or cannot be read.
    """
    how = {
        str(place): ocp.ArrayRestoreArgs(
            sharding=leaf.on_disk.sharding, global_shape=leaf.on_disk.shape
        )
        for place, leaf in leaves.items()
        if leaf.on_disk.size
    }
    is_part = len(leaves) < number
    args = ocp.args.PyTreeRestore(dict.fromkeys(how, 0), how, partial_restore=is_part)
    # Not the checkpointer, at whose barrier the other processes would wait for one that fails.
    handler = ocp.PyTreeCheckpointHandler()
    try:
        # It compares the shapes before it takes memory for them.
        found = handler.restore(folder / ARRAYS, args=args)
    except Exception as error:  # Orbax and TensorStore raise what they like on damaged files.
        raise Damaged(f"its arrays cannot be read ({in_words(error)})") from None
    for place, leaf in leaves.items():
        if (kind := leaf.on_disk).size == 0:
            found[str(place)] = jnp.zeros(kind.shape, kind.dtype, device=kind.sharding)
        was, now = getattr(found[str(place)], "dtype", "no array"), leaf.on_disk.dtype
        if was != now:
            raise Damaged(f"{leaf.path} is {was} on disk, and {now} in the manifest")
    return {place: found[str(place)] for place in leaves}
