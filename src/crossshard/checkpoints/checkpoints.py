"""Checkpoints: saves the state of a step and restores the latest one that is whole."""

import errno
import os
import warnings
from types import TracebackType
from typing import Any, Self

import jax

from crossshard import _jax
from crossshard.checkpoints import storage
from crossshard.checkpoints.fingerprint import fingerprint
from crossshard.checkpoints.folder import Folder
from crossshard.checkpoints.hashes import hash_of
from crossshard.checkpoints.leaves import from_disk, leaves_of, to_disk
from crossshard.checkpoints.manifest import (
    FILE,
    Damaged,
    Manifest,
    WrittenLeaf,
    check_data,
    read_manifest,
)
from crossshard.checkpoints.match import Different, groups_of, match
from crossshard.checkpoints.together import agree_to_read, agree_to_write, listed
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWarning,
)
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.options import NEW, completed
from crossshard.train_step.state import TrainState
from crossshard.train_step.train_step import TrainStep, layout_of, loss_of


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
        self._numbers = listed(self._folder.path, self._created, step.mesh)
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
        if not self._may_write:
            raise ArgumentError(
                f"{self._folder.path} has checkpoints of a run that this one has not restored, and "
                f"they would be deleted in time. Call restore_latest(state) before save, or choose "
                f"another folder."
            )
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
            groups_of(layout),
            str(state.rng_impl),
            self._fingerprint(layout, state),
            written,
            data,
        ).to_json()
        reason = agree_to_write(self._why_not(), manifest, self._step.mesh)
        if reason:
            raise CheckpointError(
                f"Checkpoint {number} cannot be written to {self._folder.path}: {reason}."
                f"{self._last()}"
            )
        self._pending = number
        try:
            self._writer = self._writer or storage.Writer()
            self._writer.start(self._folder.of(number), arrays, manifest)
        except Exception as error:
            raise self._failed(error) from error

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
        oldest = self._good()[-self._keep :][0]
        for number in [each for each in self._numbers if each < oldest]:
            self._numbers.remove(number)
            self._delete(number)

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

    def restore_latest(
        self, state: TrainState, *, strict: bool = True
    ) -> tuple[TrainState, Any] | None:
        """Restore the latest checkpoint that is whole, on the mesh of the step.

        If one is damaged, a ``CheckpointWarning`` says why, and the one before is taken. If another
        number of shards wrote it, this does what ``step.reshard`` does. If a step with other
        options wrote it, what an option that is new keeps is made, what one that is gone kept is
        left out, and a ``CheckpointWarning`` says so, and which numbers are others.

        Args:
          state: a state of the step, such as ``step.init(params)``, of which only the types are
            read; ``step.abstract_init(params)`` takes no memory.
          strict: whether to refuse what changes the meaning of a step: the reduction, another
            preprocessor, another update, dtypes. If not, this is said by the warning, too, and
            what of the optimizer's state is not in the checkpoint is made anew.

        Returns:
          The state, and the data that was saved with it; ``None`` if there is no checkpoint.

        Raises:
          ArgumentError, ArgumentTypeError: the state is not of this step.
          CheckpointDamagedError: there are checkpoints, and none is whole.
          CheckpointError: the folder cannot be read.
          CheckpointMismatchError: it is another model's or optimizer's, or has other dtypes.
        """
        if not isinstance(strict, bool):
            raise ArgumentTypeError(f"strict is True or False; got {strict!r:.60}.")
        layout = layout_of(self._step, state)
        self.wait()
        self._numbers = listed(self._folder.path, self._folder.numbers, self._step.mesh)
        reasons = []
        for number in reversed(self._numbers):
            try:
                found = self._restore(number, layout, state, strict)
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
                f"No checkpoint in {self._folder.path} is whole: {'; '.join(reasons)}. Bring back "
                f"a copy of it, or choose another folder to start again in."
            )
        self._may_write = True
        return None

    def _restore(
        self, number: int, layout: StateLayout, state: TrainState, strict: bool
    ) -> tuple[Any, Any]:
        """A state and its data; raises Damaged, in every process, if one finds it so."""
        refused: Exception | None = None
        try:
            self._folder.check(number)
            folder = self._folder.of(number)
            manifest = read_manifest(folder / storage.MANIFEST / FILE, number)
            leaves = leaves_of(layout, state, manifest.shards)
            own = self._fingerprint(layout, state)
            matched = match(manifest, leaves, layout, state, own, strict=strict)
            read = storage.read(folder, matched.read, len(manifest.leaves))
        except Different as error:
            refused = CheckpointMismatchError(
                f"Checkpoint {number} in {self._folder.path} is not of this step: {error}"
            )
        except (Damaged, CheckpointMismatchError) as error:
            refused = error
        agree_to_read(refused, self._step.mesh)
        # The processes compute the hashes together, so all of them must have come this far.
        with _jax.in_place_of_the_users_mesh(layout.mesh):
            written = [(manifest.leaves[place], x) for place, x in read.items()]
            wrong = [leaf.path for leaf, x in written if hash_of(x) != leaf.hash]
        if wrong:
            more = f", as do {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
            refused = Damaged(f"{wrong[0]} has not the values that were written{more}")
        agree_to_read(refused, self._step.mesh)
        if matched.notes:
            warnings.warn(
                f"{self._folder.path}, checkpoint {number} is of a step that differs: "
                f"{'; '.join(matched.notes)}.",
                CheckpointWarning,
                stacklevel=3,
            )
        arrays = [NEW if place is None else read[place] for place in matched.places]
        with _jax.in_place_of_the_users_mesh(layout.mesh):
            shardings = [leaf.on_disk.sharding for leaf in leaves]
            whole = completed(layout, from_disk(state, arrays), shardings)
        return self._step.reshard(whole), manifest.data

    def _fingerprint(self, layout: StateLayout, state: TrainState) -> dict[str, Any]:
        # It traces the optimizer, and a loop saves the states of one layout. The layout is kept, so
        # that no other one gets its id.
        if id(layout) not in self._fingerprints:
            one = 0 if layout.groups is None else 1
            types = lambda x: jax.ShapeDtypeStruct(x.shape[one:], x.dtype)
            found = fingerprint(layout, loss_of(self._step), jax.tree.map(types, state.params))
            self._fingerprints[id(layout)] = layout, found
        return self._fingerprints[id(layout)][1]

    # The folder.

    def _created(self) -> list[int]:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        return self._folder.numbers()

    def _good(self) -> list[int]:
        return [number for number in self._numbers if number not in self._damaged]

    def _why_not(self) -> str:
        """The reason why the first process cannot write; empty if it can."""
        if jax.process_index() != 0:
            return ""
        reason = self._folder.why_not_writable()
        if not reason and self._writer is None:
            self._folder.delete_unfinished()
        return reason

    def _delete(self, number: int) -> None:
        if jax.process_index() != 0:
            return
        try:
            self._folder.delete(number)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {number} in {self._folder.path} is older than the newest "
                f"{self._keep}, and cannot be deleted: {error}. The newer ones are whole."
            ) from error

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
        good = self._good()
        if not good or not self._folder.of(good[-1]).is_dir():
            return ""
        return f" Checkpoint {good[-1]} is the last one that was, and is as it was."


def _in_words(error: BaseException) -> str:
    """What went wrong; TensorStore tells it in the middle of a long text."""
    text = " ".join(str(error).split())
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
        if os.strerror(number) in text:
            full = number in (errno.ENOSPC, errno.EDQUOT)
            return f"{os.strerror(number)}{', the disk is full' if full else ''}"
    return f"{type(error).__name__}, {text:.300}"
