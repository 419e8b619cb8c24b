"""Checkpoints: saves the state of a step and restores the latest one that is whole."""

import hashlib
import json
import os
import warnings
from types import TracebackType
from typing import Any, Self

import jax

from crossshard import _jax
from crossshard.checkpoints import storage
from crossshard.checkpoints.fingerprint import difference, fingerprint
from crossshard.checkpoints.folder import Folder
from crossshard.checkpoints.hashes import hash_of
from crossshard.checkpoints.leaves import Leaf, from_disk, leaves_of, to_disk
from crossshard.checkpoints.manifest import (
    FILE,
    Damaged,
    Manifest,
    WrittenLeaf,
    check_data,
    read_manifest,
)
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWarning,
)
from crossshard.train_step.agreement import exchange
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.state import TrainState
from crossshard.train_step.train_step import TrainStep, layout_of


class Checkpoints:
    """The checkpoints of a run in a folder: the state of a step, and where its data stands.

    Arrays are written in the shapes of model and optimizer, so that a state comes back on any
    number of shards, replicated or sharded, and with the model split over other axes. Each has a
    hash, which is checked when it is read. If there are several processes, all of them make the
    same calls, and the folder is one that all of them see.

    Args:
      folder: the folder; it is created if it does not exist.
      step: the step whose states are saved, from ``make_train_step``.
      keep: how many checkpoints to keep, the newest ones.

    Raises:
      ArgumentError, ArgumentTypeError: not a folder, not a step, or not a number of at least 1.
      CheckpointError: the folder cannot be created.

    >>> import jax.numpy as jnp, optax, tempfile
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
    >>> state, folder = step.init(jnp.float32(3)), tempfile.mkdtemp()
    >>> with Checkpoints(folder, step) as checkpoints:
    ...     print(checkpoints.restore_latest(state))
    ...     checkpoints.save(state, data={"epoch": 1})
    None
    >>> state, data = Checkpoints(folder, step).restore_latest(state)
    >>> float(state.params), data
    (3.0, {'epoch': 1})
    """

    def __init__(self, folder: str | os.PathLike[str], step: TrainStep, keep: int = 3):
        if not isinstance(step, TrainStep):
            raise ArgumentTypeError(
                f"step must come from make_train_step; got {type(step).__name__}."
            )
        if not isinstance(keep, int) or isinstance(keep, bool):
            raise ArgumentTypeError(f"keep must be an int; got {type(keep).__name__}.")
        if keep < 1:
            raise ArgumentError(f"keep must be at least 1, to have a checkpoint; got {keep}.")
        self._folder, self._step, self._keep = Folder(folder), step, keep
        self._writer: storage.Writer | None = None
        # The checkpoint that is being written.
        self._pending: int | None = None
        self._damaged: set[int] = set()
        self._fingerprints: dict[int, tuple[StateLayout, dict[str, Any]]] = {}
        self._numbers = self._listed(self._create)
        self._may_write = not self._numbers

    def __repr__(self) -> str:
        return f"Checkpoints({str(self._folder.path)!r}, keep={self._keep})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as own:
            if error is None:
                raise
            error.add_note(str(own))

    def save(self, state: TrainState, data: Any = None) -> None:
        """Begin to write a checkpoint; the next step may donate the state.

        It is written in the background, and it is there as a whole or not at all. It waits for the
        one before.

        Args:
          state: a state of the step.
          data: where the data stands, as JSON; ``restore_latest`` returns it. If there are several
            processes, all pass the same.

        Raises:
          ArgumentError, ArgumentTypeError: the state is not of this step, JSON cannot hold the
            data, processes pass other data, or the folder has another run's checkpoints.
          CheckpointError: it cannot be written, or the one before could not be.
        """
        layout = layout_of(self._step, state)
        check_data(data)
        self.wait()
        taken = int(state.step)
        number = max([taken, *(newest + 1 for newest in self._numbers[-1:])])
        with _jax.in_place_of_the_users_mesh(layout.mesh):
            leaves = leaves_of(layout, state, layout.number_of_shards)
            arrays = [to_disk(*each) for each in zip(leaves, jax.tree.leaves(state), strict=True)]
            written = [
                WrittenLeaf(leaf.path, x.shape, leaf.dtype, hash_of(x))
                for leaf, x in zip(leaves, arrays, strict=True)
            ]
        manifest = Manifest(
            number,
            taken,
            layout.number_of_shards,
            _groups(layout),
            str(state.rng_impl),
            self._fingerprint(layout, state),
            written,
            data,
        ).to_json()
        self._agree_to_write(manifest)
        try:
            self._writer = self._writer or storage.Writer()
            self._writer.start(self._folder.of(number), arrays, manifest)
        except Exception as error:
            self._pending = number
            raise self._failed(error) from error
        self._pending = number

    def wait(self) -> None:
        """Wait until the last checkpoint is written, and delete those beyond ``keep``.

        Raises:
          CheckpointError: it could not be written; those before it are as they were.
        """
        if self._pending is None:
            return
        assert self._writer is not None
        try:
            self._writer.wait()
        except Exception as error:
            raise self._failed(error) from error
        self._numbers.append(self._pending)
        self._pending = None
        good = [number for number in self._numbers if number not in self._damaged]
        kept = [number for number in self._numbers if number >= good[-self._keep :][0]]
        if jax.process_index() == 0:
            for number in self._numbers[: -len(kept)]:
                try:
                    self._folder.delete(number)
                except OSError as error:
                    raise CheckpointError(
                        f"Checkpoint {number} in {self._folder.path} is older than the {self._keep} "
                        f"to keep, and cannot be deleted: {error}. The newer ones are whole."
                    ) from error
        self._numbers = kept

    def close(self) -> None:
        """Wait until the last checkpoint is written; leaving the ``with`` block does it.

        Raises:
          CheckpointError: as for ``wait``.
        """
        try:
            self.wait()
        finally:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.close()

    def restore_latest(self, state: TrainState) -> tuple[TrainState, Any] | None:
        """Restore the latest checkpoint that is whole, on the mesh of the step.

        If one is damaged, a ``CheckpointWarning`` says why, and the one before is taken. If another
        number of shards wrote it, this does what ``step.reshard`` does.

        Args:
          state: a state of the step, such as ``step.init(params)``, of which only the types are
            read; ``step.abstract_init(params)`` takes no memory.

        Returns:
          The state, and the data that was saved with it; ``None`` if there is no checkpoint.

        Raises:
          ArgumentError, ArgumentTypeError: the state is not of this step.
          CheckpointDamagedError: there are checkpoints, and none is whole.
          CheckpointError: the folder cannot be read.
          CheckpointMismatchError: it is another model's or optimizer's, or has other dtypes.
        """
        layout = layout_of(self._step, state)
        self.wait()
        self._numbers = self._listed()
        reasons = []
        for number in reversed(self._numbers):
            try:
                found = self._restore(number, layout, state)
            except Damaged as damage:
                self._damaged.add(number)
                reasons.append(f"checkpoint {number}: {damage}")
                continue
            for reason in reasons:
                warnings.warn(
                    f"{self._folder.path}, {reason}. It is damaged and passed over; checkpoint "
                    f"{number} is taken.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            self._may_write = True
            return found
        if reasons:
            raise CheckpointDamagedError(
                f"No checkpoint in {self._folder.path} is whole: {'; '.join(reasons)}. Bring back a "
                f"copy of it, or choose another folder to start again in."
            )
        self._may_write = True
        return None

    def _restore(self, number: int, layout: StateLayout, state: TrainState) -> tuple[Any, Any]:
        """A state and its data; raises Damaged, in every process, if one finds it so."""
        own: tuple[str, str] = ("", "")
        arrays: list[jax.Array] = []
        try:
            self._folder.check(number)
            file = self._folder.of(number) / storage.MANIFEST / FILE
            manifest = read_manifest(file, number)
            leaves = leaves_of(layout, state, manifest.shards)
            self._check_match(manifest, leaves, layout, state)
            arrays = storage.read(self._folder.of(number), leaves)
        except Damaged as damage:
            own = ("damaged", str(damage))
        except CheckpointMismatchError as mismatch:
            own = ("other", str(mismatch))
        self._agree_to_read(own)
        # The processes compute it together, so that all of them must have come this far.
        with _jax.in_place_of_the_users_mesh(layout.mesh):
            wrong = [
                leaf.path
                for leaf, x, written in zip(leaves, arrays, manifest.leaves, strict=True)
                if hash_of(x) != written.hash
            ]
        if wrong:
            more = f", as do {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
            own = ("damaged", f"{wrong[0]} has not the values that were written{more}")
        self._agree_to_read(own)
        return self._step.reshard(from_disk(state, arrays)), manifest.data

    def _check_match(
        self, manifest: Manifest, leaves: list[Leaf], layout: StateLayout, state: TrainState
    ) -> None:
        """Raise unless a checkpoint is of this step's model and optimizer."""
        found = (
            difference(manifest.optimizer, self._fingerprint(layout, state))
            or _first_difference(manifest, leaves)
            or _other(manifest, layout, state)
        )
        if found is not None:
            raise CheckpointMismatchError(
                f"Checkpoint {manifest.number} in {self._folder.path} is not of this step: {found}."
                f" Build the step as it was when it was saved, or choose another folder."
            )

    def _fingerprint(self, layout: StateLayout, state: TrainState) -> dict[str, Any]:
        # It traces the optimizer, and a loop saves the states of one layout. The layout is kept, so
        # that no other one gets its id.
        if id(layout) not in self._fingerprints:
            one = 1 if layout.groups is not None else 0
            types = lambda x: jax.ShapeDtypeStruct(x.shape[one:], x.dtype)
            self._fingerprints[id(layout)] = (
                layout,
                fingerprint(layout, jax.tree.map(types, state.params)),
            )
        return self._fingerprints[id(layout)][1]

    # What all processes do together.

    def _create(self) -> None:
        self._folder.path.mkdir(parents=True, exist_ok=True)

    def _listed(self, before: Any = lambda: None) -> list[int]:
        """The numbers of the checkpoints, as the first process sees them."""
        own: Any = []
        if jax.process_index() == 0:
            try:
                before()
                own = self._folder.numbers()
            except OSError as error:
                own = str(error)
        found = json.loads(exchange("Checkpoints", json.dumps(own), self._step.mesh)[0])
        if isinstance(found, str):
            raise CheckpointError(
                f"{self._folder.path} cannot be used as a folder of checkpoints: {found}. Choose a "
                f"folder that this user may write to."
            )
        return [int(number) for number in found]

    def _agree_to_write(self, manifest: dict[str, Any]) -> None:
        """Raise, in every process, unless all would write the same and the folder can be written.

        With one process only the latter.
        """
        if not self._may_write:
            raise ArgumentError(
                f"{self._folder.path} has checkpoints of a run that this one has not restored, and "
                f"they would be deleted in time. Call restore_latest(state) before save, or choose "
                f"another folder."
            )
        reason = ""
        if jax.process_index() == 0:
            reason = self._folder.why_not_writable()
            if not reason and self._writer is None:
                self._folder.delete_unfinished()
        said = [reason, _digest({**manifest, "data": None, "sha256": None}), _digest(manifest)]
        all_said = [
            json.loads(each) for each in exchange("save", json.dumps(said), self._step.mesh)
        ]
        if all_said[0][0]:
            raise CheckpointError(
                f"Checkpoint {manifest['number']} cannot be written to {self._folder.path}: "
                f"{all_said[0][0]}.{self._last()}"
            )
        for process, (_, state, everything) in enumerate(all_said):
            if (state, everything) != tuple(all_said[0][1:]):
                what = "data" if state == all_said[0][1] else "a state"
                raise ArgumentError(
                    f"To save, process {process} of the mesh passed {what} other than the first "
                    f"one. Every process passes the same; data of all of them is one dict."
                )

    def _agree_to_read(self, own: tuple[str, str]) -> None:
        """Raise, in every process, what the first one that could not read it has found."""
        told = [json.loads(each) for each in exchange("restore", json.dumps(own), self._step.mesh)]
        for kind in ("damaged", "other"):
            for found, text in told:
                if found == kind:
                    raise Damaged(text) if kind == "damaged" else CheckpointMismatchError(text)

    def _failed(self, error: Exception) -> CheckpointError:
        """The error to raise if a checkpoint could not be written, after tidying up."""
        number, self._pending = self._pending, None
        # Orbax's checkpointer keeps its error; the next save gets a new one.
        self._writer = None
        reason = self._folder.why_not_writable() or _in_words(error)
        if jax.process_index() == 0 and self._folder.path.is_dir():
            self._folder.delete_unfinished()
        return CheckpointError(
            f"Checkpoint {number} was not written to {self._folder.path}: {reason}.{self._last()}"
        )

    def _last(self) -> str:
        good = [number for number in self._numbers if number not in self._damaged]
        if not good or not self._folder.of(good[-1]).is_dir():
            return ""
        return f" Checkpoint {good[-1]} is the last one that was, and is as it was."


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if "No space left" in text or "RESOURCE_EXHAUSTED" in text:
        return f"the disk is full ({text:.200})"
    return f"{type(error).__name__}, {text:.300}"


def _groups(layout: StateLayout) -> list[list[int]] | None:
    return None if layout.groups is None else [list(group) for group in layout.groups.groups]


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _first_difference(manifest: Manifest, leaves: list[Leaf]) -> str | None:
    """The first array in which a checkpoint differs from the leaves of this step."""
    written, own = ({leaf.path: leaf for leaf in each} for each in (manifest.leaves, leaves))
    for path, leaf in own.items():
        if path not in written:
            return f"it has no {path}"
        was = written[path]
        if was.dtype != leaf.dtype:
            return f"{path} is {was.dtype} in it, and {leaf.dtype} here"
        if was.shape != leaf.on_disk.shape:
            return f"{path} has the shape {was.shape} in it, and {leaf.on_disk.shape} here"
    extra = next((path for path in written if path not in own), None)
    if extra is not None:
        return f"it also has {extra}"
    return None if list(written) == list(own) else "its arrays are in another order"


def _other(manifest: Manifest, layout: StateLayout, state: TrainState) -> str | None:
    """What else tells the step that wrote a checkpoint from this one."""
    if manifest.groups != _groups(layout):
        return f"its groups are {manifest.groups}, and here {_groups(layout)}"
    if manifest.rng != str(state.rng_impl):
        return f"its random key is of {manifest.rng}, and here of {state.rng_impl}"
    return None
