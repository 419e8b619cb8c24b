"""Storage: writes and reads the arrays of a checkpoint with Orbax."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from crossshard.checkpoints.leaves import Leaf
from crossshard.checkpoints.manifest import FILE, Damaged

# The two parts of a checkpoint, and the folders that they are in.
ARRAYS, MANIFEST = "state", "manifest"


class Writer:
    """Writes checkpoints in the background, each complete or not at all."""

    def __init__(self) -> None:
        # Here and not above: it takes half a second to import, and most programs save nothing.
        import orbax.checkpoint as ocp

        self._args = ocp.args
        handlers = {
            ARRAYS: ocp.PyTreeCheckpointHandler(),
            MANIFEST: ocp.JsonCheckpointHandler(FILE),
        }
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
        self._quiet = _RaisedAnyway()
        logging.getLogger("absl").addFilter(self._quiet)

    def start(self, folder: Path, arrays: list[jax.Array], manifest: Mapping[str, Any]) -> None:
        """Begin to write; every process calls it. The arrays may not be donated."""
        self._quiet.folder = str(folder)
        named = {str(place): array for place, array in enumerate(arrays)}
        parts = {
            ARRAYS: self._args.PyTreeSave(named),
            MANIFEST: self._args.JsonSave(manifest),
        }
        self._orbax.save(folder, args=self._args.Composite(**parts))

    def wait(self) -> None:
        """Wait until it is written, and raise if it could not be."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Wait, and end the threads."""
        self._orbax.close()
        logging.getLogger("absl").removeFilter(self._quiet)


class _RaisedAnyway(logging.Filter):
    """Leaves out what Orbax's threads log of failed writes to a folder: ``wait`` raises it."""

    folder = ""

    def filter(self, record: logging.LogRecord) -> bool:
        is_of_it = self.folder and self.folder in record.getMessage()
        return not (is_of_it and record.levelno >= logging.ERROR)


def read(folder: Path, leaves: Mapping[int, Leaf], number: int) -> dict[int, jax.Array]:
    """Read arrays onto the mesh, by their places among so many; each process reads its parts.

    Raises:
      Damaged: an array is missing, has another shape, or cannot be read.
    """
    import orbax.checkpoint as ocp

    # Without the checkpointer, at whose barrier the other processes would wait for one that fails.
    handler, folder = ocp.PyTreeCheckpointHandler(), folder / ARRAYS
    try:
        types = handler.metadata(folder).tree
    except Exception as error:  # Orbax and TensorStore raise what they like on damaged files.
        raise Damaged(f"the description of its arrays cannot be read ({_first(error)})") from None
    for place, leaf in leaves.items():
        _check_type(leaf, types.get(str(place)) if isinstance(types, dict) else None)
    if set(types) != set(map(str, range(number))):
        raise Damaged("it has more arrays than its manifest")

    def restore(places: list[int], *, partial: bool) -> dict[str, jax.Array]:
        how = {
            str(place): ocp.ArrayRestoreArgs(
                sharding=leaves[place].on_disk.sharding, global_shape=leaves[place].on_disk.shape
            )
            for place in places
        }
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(how, 0), restore_args=how, partial_restore=partial
        )
        found: dict[str, jax.Array] = handler.restore(folder, args=args)
        return found

    try:
        found = restore(list(leaves), partial=len(leaves) < number)
    except Exception as error:
        for place, leaf in leaves.items():
            try:
                restore([place], partial=True)
            except Exception as its_own:
                raise Damaged(f"{leaf.path} cannot be read ({_first(its_own)})") from None
        raise Damaged(f"its arrays cannot be read ({_first(error)})") from None
    return {place: found[str(place)] for place in leaves}


def _check_type(leaf: Leaf, found: Any) -> None:
    """Raise unless an array on disk has the type of its leaf, before memory is taken for it."""
    if found is None:
        raise Damaged(f"{leaf.path} is missing")
    shape, dtype = tuple(found.shape), str(found.dtype)
    if (shape, dtype) != (leaf.on_disk.shape, str(leaf.on_disk.dtype)):
        raise Damaged(
            f"{leaf.path} is {dtype}{list(shape)} on disk, and {leaf.on_disk.dtype}"
            f"{list(leaf.on_disk.shape)} in the manifest"
        )
    # A piece of an array is read as a whole.
    chunk = found.storage.chunk_shape if found.storage is not None else None
    if chunk is not None and math.prod(chunk) > max(1, math.prod(shape)):
        raise Damaged(f"{leaf.path} is stored in pieces that are larger than it is, {chunk}")


def _first(error: BaseException) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
