"""Saving: writes checkpoints one after the other, and deletes those that do not stay."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from crossshard import _mesh
from crossshard._hash import crc32, hash_later
from crossshard.checkpoints.folder import LARGEST, Folder, in_words
from crossshard.checkpoints.keeping import Keeping
from crossshard.checkpoints.leaves import leaves_of, to_disk
from crossshard.checkpoints.lock import Lock
from crossshard.checkpoints.manifest import FILE, Fingerprint, Manifest, WrittenLeaf
from crossshard.checkpoints.match import groups_of
from crossshard.distributed.agreement import check_agreement, exchange
from crossshard.distributed.progress import waiting
from crossshard.errors import CheckpointError
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


class Saving:
    """The one writer of a folder, from its first checkpoint until it is closed.

    Attributes:
      numbers: the numbers of the checkpoints, ascending. Only the first process deletes any, so
        that the others may know more.
      damaged: those that were found damaged.
      taken: the number of steps of the last state; ``None`` before, and after a failure.

    Args:
      folder: the folder.
      mesh: the mesh whose processes save together.
      keeping: which of them stay.
      numbers: those that are there.
    """

    def __init__(self, folder: Folder, mesh: Mesh, keeping: Keeping, numbers: list[int]):
        self._folder, self._mesh, self._keeping = folder, mesh, keeping
        self._lock = Lock(folder.path, remote=folder.remote)
        self._orbax: ocp.AsyncCheckpointer | None = None
        # The checkpoint that is being written.
        self._pending: int | None = None
        self.numbers: list[int] = numbers
        self.damaged: set[int] = set()
        self.taken: int | None = None

    def start(
        self,
        layout: StateLayout,
        state: TrainState,
        fingerprint: Fingerprint,
        data: Any,
        notes: Mapping[str, str],
    ) -> None:
        """Begin to write a state, once the one before is written; the next step may donate it.

        Args:
          layout: its layout.
          state: the state.
          fingerprint: that of the step.
          data: what the user saves beside it.
          notes: texts to write beside the manifest, by the names of their files.

        Raises:
          ArgumentError: the processes would write different states or data.
          CheckpointError: it cannot be written, or the one before could not be.
        """
        self._finish()
        taken = int(state.step)
        number = max([taken, *(newest + 1 for newest in self.numbers[-1:])])
        if number > LARGEST:
            raise CheckpointError(
                f"No checkpoint can be written after {self._folder.of(LARGEST)}, since {LARGEST} "
                f"is the largest number. No run counts so far: move that folder to another place."
            )
        leaves = leaves_of(layout, state, layout.number_of_shards)
        manifest = Manifest(
            number,
            taken,
            layout.number_of_shards,
            groups_of(layout),
            str(state.rng_impl),
            fingerprint,
            [WrittenLeaf(leaf.path, leaf.on_disk.shape, leaf.dtype, "") for leaf in leaves],
            data,
        )
        check_agreement(
            "save",
            lambda: {
                "a state": _sum(dataclasses.replace(manifest, data=None).to_json()),
                "data": _sum(data),
            },
            self._mesh,
            "Every process passes the same; where all of them stand is one dict.",
        )
        reason = exchange("save", self._why_not(), self._mesh, within="lock")[0]
        if reason:
            raise CheckpointError(
                f"Checkpoint {number} cannot be written to {self._folder.path}: {reason}."
                f"{self._last()}"
            )
        self._pending, self.taken = number, taken
        try:
            with _mesh.in_place_of_the_users_mesh(layout.mesh):
                arrays = list(map(to_disk, leaves, jax.tree.leaves(state)))
            hashes = [hash_later(x) for x in arrays]
            files = lambda: {FILE: json.dumps(_completed(manifest, hashes)), **notes}
            # Here and not above: it imports Orbax.
            from crossshard.checkpoints import storage

            self._orbax = self._orbax or storage.checkpointer()
            with waiting("save"):
                storage.start(self._orbax, self._folder.of(number), arrays, files)
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait until all is written, and deleted that does not stay.

        Raises:
          CheckpointError: the last one could not be written.
        """
        self._finish()
        self._keeping.wait()

    def close(self) -> None:
        """Wait, and let others write.

        Raises:
          CheckpointError: the last one could not be written.
        """
        try:
            self.wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None
            self._lock.release()

    def _finish(self) -> None:
        if self._pending is None:
            return
        assert self._orbax is not None
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self.numbers.append(self._pending)
        self._pending = None
        if jax.process_index() == 0:
            for number in self._keeping.too_many(self.numbers, self.damaged):
                self.numbers.remove(number)
                self._delete(number)

    def _delete(self, number: int) -> None:
        try:
            self._keeping.delete(number)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {number} in {self._folder.path} is older than those to keep, and "
                f"cannot be deleted: {error}. The newer ones are whole."
            ) from error

    def _why_not(self) -> str:
        """The reason why the first process cannot write; empty if it can."""
        if jax.process_index() != 0:
            return ""
        try:
            reason = self._folder.why_not_writable() or self._lock.take()
            if not reason and self._orbax is None:
                self._folder.delete_unfinished()
        except OSError as error:
            reason = str(error)
        return reason

    def _failed(self, error: Exception) -> CheckpointError:
        """The error to raise if a checkpoint could not be written, after tidying up."""
        number, self._pending = self._pending, None
        # Orbax's checkpointer keeps its error; the next save gets a new one.
        self._orbax = self.taken = None
        reason = self._folder.why_not_writable() or in_words(error)
        if jax.process_index() == 0 and self._folder.path.is_dir():
            self._folder.delete_unfinished()
        return CheckpointError(
            f"Checkpoint {number} was not written to {self._folder.path}: {reason}.{self._last()}"
        )

    def _last(self) -> str:
        good = [number for number in self.numbers if number not in self.damaged]
        if not good or not self._folder.of(good[-1]).is_dir():
            return ""
        return f" Checkpoint {good[-1]} is the last one that was, and is as it was."


def _sum(value: Any) -> str:
    return f"checksum {crc32(json.dumps(value, sort_keys=True))}"


def _completed(manifest: Manifest, hashes: list[Callable[[], str]]) -> dict[str, Any]:
    """The manifest with the hashes of its arrays, as it is written."""
    leaves = [
        dataclasses.replace(leaf, hash=of_it())
        for leaf, of_it in zip(manifest.leaves, hashes, strict=True)
    ]
    return dataclasses.replace(manifest, leaves=leaves).to_json()
