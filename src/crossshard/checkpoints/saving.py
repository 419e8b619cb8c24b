"""Saving: writes checkpoints one after the other, and deletes those that do not stay."""

import dataclasses
import json
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
from jax.sharding import Mesh
from orbax.checkpoint import checkpoint_managers as policies

from crossshard import _check, _mesh
from crossshard._hash import crc32, hash_later
from crossshard.checkpoints import storage
from crossshard.checkpoints.data import PASS_THE_SAME, Data
from crossshard.checkpoints.folder import Folder, Lock, in_words, printable, read
from crossshard.checkpoints.manifest import FILE, Fingerprint, manifest_of
from crossshard.distributed.agreement import check_agreement, exchange, processes_of
from crossshard.distributed.watch import waiting
from crossshard.errors import CheckpointError
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState

# Files beside a checkpoint's manifest. To keep a checkpoint, the first can be made by hand.
_PINNED, _SCORE = "pinned", "score.txt"
# How long a score may be.
_MOST_BYTES = 64


class Saving:
    """The one writer of a folder, from its first checkpoint until it is closed.

    The processes of the mesh save together. The newest checkpoints stay, the best, and the pinned.
    """

    def __init__(self, folder: Folder, mesh: Mesh, newest: int, best: int):
        # The numbers of the checkpoints, ascending, and of those that were found damaged. Only the
        # first process deletes checkpoints, so the others may still have their numbers.
        self.numbers: list[int] = folder.numbers(mesh, create=True)
        self.damaged: set[int] = set()
        # Whether all processes have seen what the first one writes there.
        self._shared = folder.remote
        # The number of steps of the last state; ``None`` before, and after a failure.
        self.taken: int | None = None
        self._folder, self._mesh, self._newest, self._best = folder, mesh, newest, best
        self._lock = Lock(folder.path)
        self._orbax: Any = None
        # The checkpoint that is being written, and the threads that delete others.
        self._pending: int | None = None
        self._deleting: list[threading.Thread] = []

    @property
    def newest(self) -> int:
        """The number of the newest checkpoint, also of one that is being written; -1 if none is."""
        return max(self.numbers, default=-1) if self._pending is None else self._pending

    def start(
        self,
        layout: StateLayout,
        state: TrainState,
        fingerprint: Fingerprint,
        data: Data,
        notes: Mapping[str, str],
        at_least: int = 0,
    ) -> None:
        """Begin to write a state, once the one before is written; the next step may donate it.

        The notes are texts to write beside the manifest, by the names of their files. Its number is
        ``at_least`` this, so that it comes after all that was kept before.

        Raises:
          ArgumentError: the processes would write different states or data.
          CheckpointError: it cannot be written, or the one before could not be.
        """
        self._finish()
        taken = int(state.step)
        number = max([taken, at_least, *(newest + 1 for newest in self.numbers[-1:])])
        leaves = storage.leaves_of(layout, state, layout.number_of_shards)
        manifest = manifest_of(layout, state, leaves, fingerprint, data, number, taken)
        check_agreement(
            "save",
            lambda: {
                "a state": _checksum(dataclasses.replace(manifest, data=Data(None)).to_json()),
                "data": _checksum(dataclasses.asdict(data)),
            },
            self._mesh,
            PASS_THE_SAME,
        )
        told = exchange("save", self._why_not_writable(), self._mesh, within="lock")
        reason = told[0] or self._why_not_shared()
        if reason:
            raise CheckpointError(
                f"Checkpoint {number} cannot be written to {self._folder.path}: {reason}"
            )
        self._pending, self.taken = number, taken
        try:
            with _mesh.in_place_of_the_users_mesh(layout.mesh):
                arrays = list(map(storage.to_disk, leaves, jax.tree.leaves(state)))
            hashes = [hash_later(x) for x in arrays]
            files = lambda: {FILE: json.dumps(manifest.to_json([own() for own in hashes])), **notes}
            self._orbax = self._orbax or storage.checkpointer()
            with waiting("save"):
                storage.start(self._orbax, self._folder.of(number), arrays, files)
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait until all is written, and what does not stay is deleted; raise as ``start`` does."""
        self._finish()
        while self._deleting:
            self._deleting.pop().join()

    def _finish(self) -> None:
        if self._pending is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self.numbers.append(self._pending)
        self._pending = None
        if jax.process_index() == 0:
            for number in self._to_delete():
                self.numbers.remove(number)
                try:
                    self._deleting += self._folder.delete(number)
                except OSError as error:
                    raise CheckpointError(
                        f"Checkpoint {number} in {self._folder.path} is older than those to keep, "
                        f"and cannot be deleted: {error}. The newer ones are whole."
                    ) from error

    def close(self) -> None:
        """Wait, and let others write; raise as ``start`` does."""
        try:
            self.wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None
            self._lock.release()

    def scores(self, numbers: list[int]) -> dict[int, float]:
        """Return the scores of those checkpoints that have one, as the first process sees them."""
        own = {each: self._score(each) for each in numbers} if jax.process_index() == 0 else {}
        told = exchange("scores", json.dumps(list(own.items())), self._mesh)[0]
        return {number: score for number, score in json.loads(told) if score is not None}

    def _to_delete(self) -> list[int]:
        """Return the checkpoints that do not stay."""
        good = self.undamaged()
        scores = {number: self._score(number) for number in good if self._best}
        told = [SimpleNamespace(step=each, metrics=scores.get(each)) for each in self.numbers]
        # The damaged ones among the newest stay, too.
        newest = sum(number >= good[-self._newest :][0] for number in self.numbers)
        best = min(self._best, sum(each.metrics is not None for each in told))
        pinned = [each for each in self.numbers if self._folder.note(each, _PINNED).exists()]
        policy = policies.AnyPreservationPolicy(
            [
                policies.LatestN(newest),
                policies.BestN(get_metric_fn=float, n=best, keep_checkpoints_without_metrics=False),
                policies.CustomSteps(pinned),
            ]
        )
        stay = policy.should_preserve(told, context=policies.PreservationContext())
        return [each for each, stays in zip(self.numbers, stay, strict=True) if not stays]

    def _score(self, number: int) -> float | None:
        """Return the score of a checkpoint; ``None`` if it has none."""
        try:
            found = float(read(self._folder.note(number, _SCORE), _MOST_BYTES))
        except (OSError, ValueError):
            return None
        return None if found != found else found

    def _why_not_writable(self) -> str:
        """Return why the first process cannot write, in sentences; empty if it can."""
        if jax.process_index() != 0:
            return ""
        was_held = self._lock.held
        try:
            reason = self._folder.why_not_writable() or self._lock.take()
            newer = [] if reason or was_held else self._folder.newer(self.newest)
            if newer:
                self._lock.release()
                return (
                    f"another run has written checkpoint {newer[-1]} there, which this one has not "
                    f"restored. Call restore_latest(state) and go on from there, or choose another "
                    f"folder."
                )
            if not reason and self._orbax is None:
                self._folder.delete_unfinished()
        except OSError as error:
            reason = str(error)
        return reason and f"{reason}.{self._last()}"

    def _why_not_shared(self) -> str:
        """Return why not all processes see what the first one writes; empty if they do."""
        processes = processes_of(self._mesh)
        if self._shared or jax.process_index() not in processes or processes[0] != 0:
            return ""
        own = json.dumps([self._lock.token, str(self._folder.path)])
        token, path = json.loads(exchange("save", own, self._mesh)[0])
        sees = jax.process_index() == 0 or self._lock.sees(token)
        told = exchange("save", "sees" if sees else "", self._mesh, within="lock")
        self._shared = all(told)
        if self._shared:
            return ""
        self._lock.release()
        return (
            f"process {processes[told.index('')]} does not see what process 0 has written in "
            f"{printable(path)}. Give all processes one folder that they share."
        )

    def _failed(self, error: Exception) -> CheckpointError:
        """Tidy up after a checkpoint that could not be written, and return the error to raise."""
        number, self._pending = self._pending, None
        # Orbax's checkpointer keeps its error; the next save gets a new one.
        self._orbax = self.taken = None
        reason = self._folder.why_not_writable() or in_words(error)
        # Other processes that still write would fail, too; then the next save deletes it.
        if jax.process_count() == 1 and self._folder.path.is_dir():
            self._folder.delete_unfinished()
        return CheckpointError(
            f"Checkpoint {number} was not written to {self._folder.path}: {reason}.{self._last()}"
        )

    def _last(self) -> str:
        good = self.undamaged()
        if not good or not self._folder.of(good[-1]).is_dir():
            return ""
        return f" Checkpoint {good[-1]} is the last one that was, and is as it was."

    def undamaged(self) -> list[int]:
        """Return the numbers of the checkpoints that no restore has found damaged, ascending."""
        return [number for number in self.numbers if number not in self.damaged]


def _checksum(value: Any) -> str:
    return f"checksum {crc32(json.dumps(value, sort_keys=True))}"


def notes_of(score: Any, pin: Any) -> dict[str, str]:
    """Check a score and a pin, and return them as texts by the names of their files."""
    notes = {_PINNED: ""} if _check.flag("pin", pin) else {}
    if isinstance(score, jax.Array):
        score = jax.device_get(_check.array("score", score))
    return notes if score is None else {_SCORE: repr(_check.number("score", score)), **notes}
