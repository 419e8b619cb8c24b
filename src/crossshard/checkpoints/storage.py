"""Storage: writes and reads the arrays of a checkpoint with Orbax.

It takes half a second to import, and most programs save nothing: import it where it is needed.
"""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from crossshard.checkpoints.folder import ARRAYS, NOTES, Damaged, in_words
from crossshard.checkpoints.leaves import Leaf

# So that a device that reads a part of an array need not read all of it.
_PIECE = 16 << 20


class _NotesHandler(ocp.JsonCheckpointHandler):
    """Writes, in the background and in the first process, texts that a function returns.

    The manifest is one of them: it has the hashes, which are computed while the arrays are written.
    """

    async def async_save(self, directory: Any, args: "_Notes") -> list[Any]:
        """Begin; the files are there before the checkpoint is complete."""

        async def write() -> None:
            if jax.process_index() == 0:
                for name, text in args.files().items():
                    (directory / name).write_text(text)

        return [future.CommitFutureAwaitingContractedSignals(write(), name="crossshard")]


# Orbax knows no handler that has arguments for one of both only.
@ocp.args.register_with_handler(_NotesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _Notes(ocp.args.CheckpointArgs):
    files: Callable[[], dict[str, str]]


# The checkpoints of whose failed writes ``wait_until_finished`` tells.
_ours: set[str] = set()


def checkpointer() -> ocp.AsyncCheckpointer:
    """What writes checkpoints in the background, each complete or not at all.

    Numbers, retention and agreement are not Orbax's ``CheckpointManager``'s: each of its saves,
    deletions and restores begins at a barrier, where all processes wait for one that has failed,
    and it knows neither damaged checkpoints nor another writer.
    """
    # Orbax's threads log their errors, and asyncio those of tasks that nobody waits for any more.
    for library in ("absl", "asyncio"):
        logging.getLogger(library).addFilter(_is_told)
    # Of an array that several devices have one writes it, instead of each a slice, which is a copy.
    of_arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, of_arrays))
    handlers = {
        ARRAYS: ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        NOTES: _NotesHandler(),
    }
    # Else threads that write wait ten minutes, also at exit, for one that cannot make a folder.
    options = ocp.AsyncOptions(create_directories_asynchronously=False)
    composite = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(async_options=options), **handlers
    )
    return ocp.AsyncCheckpointer(composite, async_options=options)


def _is_told(record: logging.LogRecord) -> bool:
    if record.levelno < logging.ERROR:
        return True
    return not any(folder in record.getMessage() for folder in _ours)


_before = sys.unraisablehook


def _unraisable(found: Any) -> None:
    late = isinstance(found.exc_value, RuntimeError) and found.object is None
    if not (late and str(found.exc_value) == "Event loop is closed"):
        _before(found)


# TensorStore complains of each write whose thread has gone since another one failed.
sys.unraisablehook = _unraisable


def start(
    orbax: ocp.AsyncCheckpointer,
    folder: Path,
    arrays: list[jax.Array],
    notes: Callable[[], dict[str, str]],
) -> None:
    """Begin to write; every process calls it. The arrays may be donated once it returns.

    The notes are the manifest, and what stands beside it: texts by the names of their files.

    Orbax has the arrays on the host by then. There an array on a CPU device is not copied:
    while someone looks at its memory, JAX donates it to no one.
    """
    _ours.add(str(folder))
    named = {str(place): array for place, array in enumerate(arrays)}
    pieces = dict.fromkeys(named, ocp.SaveArgs(chunk_byte_size=_PIECE))
    parts = {ARRAYS: ocp.args.PyTreeSave(named, pieces), NOTES: _Notes(notes)}
    orbax.save(folder, args=ocp.args.Composite(**parts))


def read(folder: Path, leaves: Mapping[int, Leaf], number: int) -> dict[int, jax.Array]:
    """Read arrays onto the mesh, by their places among so many; each process reads its parts.

    Raises:
      Damaged: an array is missing, has another shape, or cannot be read.
    """
    # Without the checkpointer, at whose barrier the other processes would wait for one that fails.
    handler, folder = ocp.PyTreeCheckpointHandler(), folder / ARRAYS
    try:
        types = handler.metadata(folder).tree
    except Exception as error:  # Orbax and TensorStore raise what they like on damaged files.
        raise Damaged(f"the description of its arrays cannot be read ({in_words(error)})") from None
    for place, leaf in leaves.items():
        _check_type(leaf, types.get(str(place)) if isinstance(types, dict) else None)
    if set(types) != set(map(str, range(number))):
        raise Damaged("it has more arrays than its manifest")

    def restore(some: Mapping[int, Leaf]) -> dict[str, jax.Array]:
        how = {
            str(place): ocp.ArrayRestoreArgs(
                sharding=leaf.on_disk.sharding, global_shape=leaf.on_disk.shape
            )
            for place, leaf in some.items()
        }
        is_part = len(some) < number
        args = ocp.args.PyTreeRestore(dict.fromkeys(how, 0), how, partial_restore=is_part)
        found: dict[str, jax.Array] = handler.restore(folder, args=args)
        return found

    try:
        found = restore(leaves)
    except Exception as error:
        for place, leaf in leaves.items():
            try:
                restore({place: leaf})
            except Exception as its_own:
                raise Damaged(f"{leaf.path} cannot be read ({in_words(its_own)})") from None
        raise Damaged(f"its arrays cannot be read ({in_words(error)})") from None
    return {place: found[str(place)] for place in leaves}


def _check_type(leaf: Leaf, found: Any) -> None:
    """Raise unless an array on disk has the type of its leaf, before memory is taken for it."""
    if found is None:
        raise Damaged(f"{leaf.path} is missing")
    on_disk = leaf.on_disk
    was, now = (f"{x.dtype}{[*x.shape]}" for x in (found, on_disk))
    if was != now:
        raise Damaged(f"{leaf.path} is {was} on disk, and {now} in the manifest")
    # A piece of an array is read as a whole.
    chunk = found.storage.chunk_shape if found.storage is not None else None
    if chunk is not None and math.prod(chunk) > max(1, math.prod(on_disk.shape)):
        raise Damaged(f"{leaf.path} is stored in pieces that are larger than it is, {chunk}")
