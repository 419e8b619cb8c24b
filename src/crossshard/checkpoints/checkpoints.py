"""Checkpoints: saves the state of a step and restores the latest one that is whole."""

import os
import warnings
from typing import Any, Self

import jax

from crossshard import _check, _jax, _mesh
from crossshard._annotations import Json
from crossshard.checkpoints.data import Data, data_of
from crossshard.checkpoints.folder import Damaged, Folder
from crossshard.checkpoints.manifest import Fingerprint, fingerprint
from crossshard.checkpoints.memory import Snapshots
from crossshard.checkpoints.preemption import Preemption
from crossshard.checkpoints.reading import Found, OnDisk, Source, read_state
from crossshard.checkpoints.saving import Saving, notes_of
from crossshard.checkpoints.storage import compile_copies
from crossshard.distributed.agreement import check_agreement
from crossshard.distributed.watch import PROGRESS
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointWarning,
)
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState, check_devices, check_is_state, check_state
from crossshard.step.train_step import (
    TrainStep,
    collected,
    config_of,
    entering_of,
    layout_of,
    with_params,
)

# How many checkpoints another run may delete while they are read, before this one gives up.
_MOST_DELETED = 20


class Checkpoints:
    """The checkpoints of a run in a folder: the state of a step, and where its data stands.

    Arrays are written in the shapes of model and optimizer, so that a state comes back on any
    number of shards, replicated or sharded, and with the model split over other axes. Each has a
    hash, which is checked when it is read. If there are several processes, all of them make the
    same calls, and the folder is one that all of them see. One run at a time writes to a folder,
    from its first ``save`` until it is closed; any may read.

    Args:
      folder: the folder, which may be at ``gs://``; it is created if it does not exist.
      step: the step whose states are saved, from ``make_train_step``.
      keep: how many checkpoints to keep, the newest ones.
      keep_best: how many to keep of those that ``save`` was given the highest scores with.
      memory: a folder in the memory of each host, such as ``"/dev/shm/my-run"``, for ``snapshot``.
        It is this user's alone, and outlives the process, but not the host.
      memory_every: how many calls of ``snapshot`` make one.
      memory_copies: how many hosts keep each part of the state. With 2, each host has those of the
        next one too, and one that has lost its memory gets its parts from there.

    Attributes:
      restored_from: what the last restore has read, such as ``"Checkpoint 3 in /my/run"``; empty
        before.

    Raises:
      ArgumentError, ArgumentTypeError: not a folder, not a step, or not a number of at least 1; or
        there are copies, and the hosts do not have equally many devices; or only some processes
        pass ``memory``, or other numbers for it.
      CheckpointError: the folder cannot be created.
      DistributedError: the folder in memory cannot be created.

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

    def __init__(
        self,
        folder: str | os.PathLike[str],
        step: TrainStep,
        keep: int = 3,
        keep_best: int = 0,
        *,
        memory: str | os.PathLike[str] | None = None,
        memory_every: int = 10,
        memory_copies: int = 1,
    ):
        if not isinstance(step, TrainStep):
            raise ArgumentTypeError(
                f"step must come from make_train_step; got {type(step).__name__}."
            )
        _check.whole_number("keep", keep, most=None)
        _check.whole_number("keep_best", keep_best, least=0, most=None)
        self._every = _check.whole_number("memory_every", memory_every, most=None)
        _check.whole_number("memory_copies", memory_copies, most=2)
        check_agreement(
            "Checkpoints",
            lambda: {
                "memory": "None" if memory is None else "a folder",
                "memory_every": f"{memory_every}",
                "memory_copies": f"{memory_copies}",
            },
            step.mesh,
            "Every process passes the same; only the path of memory= may differ between hosts.",
        )
        self._folder, self._step, self._keep = Folder(folder), step, keep
        self.restored_from = ""
        self._preemption: Preemption | None = None
        self._fingerprints: dict[int, Fingerprint] = {}
        self._saving = Saving(self._folder, step.mesh, keep, keep_best)
        self._may_write = not self._saving.numbers
        self._snapshots: Snapshots | None = None
        self._calls, self._compiles = 0, False
        if memory is not None:
            run = self._folder.run(step.mesh)
            self._snapshots = Snapshots(memory, run, step.mesh, memory_copies)
            self._may_write &= not self._snapshots.has_any

    def __repr__(self) -> str:
        return f"Checkpoints({str(self._folder.path)!r}, keep={self._keep})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return self.close()
        # The other processes go on, and do not close it, so this one does not wait for them.
        try:
            self._close()
        except CheckpointError as own:
            error.add_note(str(own))

    def save(
        self, state: TrainState, data: Json = None, *, score: float | None = None, pin: bool = False
    ) -> None:
        """Begin to write a checkpoint; the next step may donate the state.

        It is written in the background, and appears as a whole or not at all. This waits for the
        one before.

        Args:
          state: a state of the step.
          data: where the data stands, as JSON, of which all processes pass the same; or an iterator
            with ``get_state`` and ``set_state``, or JSON in which there are some, each process its
            own: ``{"epoch": 3, "rows": iterator}``. Of iterators the states are saved.
            ``restore_latest`` returns it.
          score: how good the state is, for ``keep_best``: the higher the better, as ``-loss`` is.
          pin: whether to keep this checkpoint for ever.

        Raises:
          ArgumentError, ArgumentTypeError: the state is not of this step, or is on other devices;
            JSON cannot hold the data, processes pass other data, or the folder has another run's
            checkpoints.
          CheckpointError: it cannot be written, the one before could not be, another run writes
            to the folder, or not all processes see it.
        """
        _check_call("save", state, jax.Array)
        with entering_of(self._step, "save"):
            notes, given = notes_of(score, pin), self._given("save", state, data)
            memory = self._snapshots
            at_least = 0 if memory is None else memory.after(int(state.step))
            self._saving.start(*given, notes, at_least)

    def snapshot(self, state: TrainState, data: Json = None) -> None:
        """Keep every ``memory_every``-th state in the memory of the hosts; call it after each step.

        The state is copied, and written to ``memory`` beside the next steps. The last two stay. A
        process that starts again on its host finds them, and ``restore_latest`` takes the newest of
        them and the checkpoints that is whole. What does not fit is a ``CheckpointWarning``, and
        the run goes on with its checkpoints on disk.

        Args:
          state: a state of the step.
          data: where the data stands, as for ``save``.

        Raises:
          ArgumentError, ArgumentTypeError: as for ``save``; or there is no ``memory``.

        >>> import jax.numpy as jnp, optax, tempfile
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.5), num_shards=1)
        >>> state, folder = step.init(jnp.float32(3)), tempfile.mkdtemp()
        >>> memory = f"{folder}-memory"  # "/dev/shm/my-run", say
        >>> checkpoints = Checkpoints(folder, step, memory=memory, memory_every=2)
        >>> for batch in range(3):
        ...     state, _ = step(state, jnp.ones(4))
        ...     checkpoints.snapshot(state, {"batch": batch + 1})
        >>> checkpoints.wait()
        >>> again = Checkpoints(folder, step, memory=memory)
        >>> state, data = again.restore_latest(state)
        >>> float(state.params), data
        (2.0, {'batch': 2})
        """
        if self._snapshots is None:
            raise ArgumentError(
                "These Checkpoints have no folder in memory. Write Checkpoints(folder, step, "
                "memory='/dev/shm/my-run')."
            )
        check_is_state(state)
        _check_at_top_level("snapshot")
        self._calls += 1
        if not self._compiles:
            layout = layout_of(self._step, state)
            self._compile_beside(layout, jax.eval_shape(layout.collected, state))
        if self._calls % self._every:
            return
        _check_call("snapshot", state, jax.Array)
        with entering_of(self._step, "snapshot"):
            newest = self._saving.newest, self._saving.taken
            self._snapshots.take(*self._given("snapshot", state, data), newest)

    def _given(
        self, call: str, state: TrainState, data: Any
    ) -> tuple[StateLayout, TrainState, Fingerprint, Data]:
        """Return what a call is given to write, with its layout and its fingerprint, if it may."""
        layout = layout_of(self._step, state)
        check_devices(state, layout.mesh)
        if not self._may_write:
            raise ArgumentError(
                f"{self._folder.path} has checkpoints of a run that this one has not restored, "
                f"and they would be deleted in time. Call restore_latest(state) before {call}, "
                f"or choose another folder."
            )
        found, where = self._fingerprint(layout), data_of(data, self._step.mesh)
        return layout.without_owners, collected(self._step, state), found, where

    def save_if_preempted(self, state: TrainState, data: Json = None) -> bool:
        """Save the state if ``SIGTERM`` asks the run to stop, and return whether it does.

        When it returns, the state is on disk. Call it after each step, in all processes, which stop
        at the same step. From the first call until ``close`` the signal no longer ends the process;
        a second one does.

        >>> import jax.numpy as jnp, optax, tempfile
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
        >>> state = step.init(jnp.float32(3))
        >>> with Checkpoints(tempfile.mkdtemp(), step) as checkpoints:
        ...     for batch in range(3):
        ...         state, metrics = step(state, jnp.ones(4))
        ...         if checkpoints.save_if_preempted(state, {"batch": batch + 1}):
        ...             break

        Args:
          state: the state after the step.
          data: where the data stands, as for ``save``.

        Raises:
          ArgumentError, ArgumentTypeError, CheckpointError: as for ``save``; or it is not called in
            the main thread.
        """
        # In every call, not only in the one that saves.
        check_is_state(state)
        _check_at_top_level("save_if_preempted")
        self._preemption = self._preemption or Preemption()
        if not self._preemption.reached():
            return False
        _check_call("save_if_preempted", state, jax.Array)
        if self._saving.taken != int(state.step):
            self.save(state, data)
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until the last checkpoint is written, and those that are not kept are deleted.

        Raises:
          CheckpointError: it could not be written; those before it are as they were.
        """
        with entering_of(self._step, "wait", counts=False):
            self._saving.wait()
            if self._snapshots is not None:
                self._snapshots.wait()

    def close(self) -> None:
        """Wait until the last checkpoint is written; leaving the ``with`` block does it.

        Raises:
          CheckpointError: as for ``wait``.
        """
        with entering_of(self._step, "wait", counts=False):
            self._close()

    def _close(self) -> None:
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        self._saving.close()
        if self._snapshots is not None:
            self._snapshots.close(max(self._saving.undamaged(), default=-1))

    def restore_latest(
        self, state: TrainState, *, strict: bool = True
    ) -> tuple[TrainState, Json] | None:
        """Restore the latest checkpoint that is whole, on the mesh of the step.

        If one is damaged, a ``CheckpointWarning`` says why, and the one before is taken. If another
        number of shards wrote it, this does what ``step.reshard`` does. If a step with other
        options wrote it, what an option that is new keeps is made, what one that is gone kept is
        left out, and a ``CheckpointWarning`` says so, and which numbers are others.

        Args:
          state: a state of the step, such as ``step.init(params)``, of which only the types are
            read; ``step.abstract_init(params)`` takes no memory.
          strict: whether to refuse what changes the meaning of a step: the reduction, another
            preprocessor, another update or outer update, dtypes, different iterators of another
            number of processes. If not, this is said by the warning, too, and what of the
            optimizer's state is not in the checkpoint is made anew, and such data is ``None``.

        Returns:
          The state, and the data that was saved with it, in the place of an iterator its state, for
          ``set_state``; ``None`` if there is no checkpoint.

        Raises:
          ArgumentError, ArgumentTypeError: the state is not of this step.
          CheckpointDamagedError: there are checkpoints, and none is whole.
          CheckpointError: the folder cannot be read.
          CheckpointMismatchError: it is another model's or optimizer's, or has other dtypes.
        """
        found = self._restored(state, None, strict)
        return None if found is None else found[:2]

    def restore(
        self, state: TrainState, step: int, *, strict: bool = True
    ) -> tuple[TrainState, Json]:
        """Restore one checkpoint, such as the last one before shards diverged.

        It does what ``restore_latest`` does. A run that goes on from it saves under higher numbers
        than those that are there.

        Args:
          state: as for ``restore_latest``.
          step: one of ``steps()``.
          strict: as for ``restore_latest``.

        Raises:
          ArgumentError, ArgumentTypeError: there is none of this step, the state is not of this
            one's step, or another process restores another checkpoint.
          CheckpointDamagedError: it is not whole.
          CheckpointError, CheckpointMismatchError: as for ``restore_latest``.
        """
        number = _check.whole_number("step", step, least=0, hint="It is one of steps().")
        found = self._restored(state, number, strict)
        assert found is not None
        return found[:2]

    def restore_best(
        self, state: TrainState, *, strict: bool = True
    ) -> tuple[TrainState, Json | bytes, int, float]:
        """Restore the checkpoint that was saved with the highest score, as ``restore_latest`` does.

        Of equal scores the newest is taken; snapshots have none.

        >>> import jax.numpy as jnp, optax, tempfile
        >>> from crossshard import make_train_step
        >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(1.0), num_shards=1)
        >>> state, folder = step.init(jnp.float32(3)), tempfile.mkdtemp()
        >>> with Checkpoints(folder, step, keep=1, keep_best=1) as checkpoints:
        ...     for score in (0.5, 0.7, 0.6):
        ...         state, _ = step(state, jnp.ones(4))
        ...         checkpoints.save(state, score=score)
        ...     state, _, number, score = checkpoints.restore_best(state)
        >>> number, score, float(state.params)
        (2, 0.7, 1.0)

        Args:
          state: as for ``restore_latest``, like ``strict``.

        Returns:
          The state, the data that was saved with it, the number of the checkpoint, its score.

        Raises: as for ``restore_latest``; and CheckpointError if none has a score.
        """
        found = self._restored(state, None, strict, best=True)
        if found is None:
            raise CheckpointError(
                f"{self._folder.path} has no checkpoint with a score. Pass one to "
                f"save(state, score=...), and keep_best= to Checkpoints."
            )
        return found

    def restore_params(self, state: TrainState, step: int | None = None) -> TrainState:
        """Return a state with the parameters of a checkpoint, whichever optimizer has trained them.

        These are all parameters of the model, trained or not, with a pytree's integers; of workers
        that synchronise rarely those that ``model(state)`` returns. What follows them is made anew,
        as ``init`` does: the moving average, masters, and what workers share. All else in the state
        is as it was, such as a model's statistics and what the optimizer itself keeps. For one that
        keeps parameters, such as ``optax.contrib.schedule_free``, write
        ``step.init(other.model(state))``.

        >>> import jax.numpy as jnp, optax, tempfile
        >>> from crossshard import make_train_step
        >>> loss_fn, folder = lambda w, x: (w * x).mean(), tempfile.mkdtemp()
        >>> step = make_train_step(loss_fn, optax.adam(0.1), num_shards=1)
        >>> with Checkpoints(folder, step) as checkpoints:
        ...     checkpoints.save(step.init(jnp.float32(3)))
        >>> other = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1)
        >>> state = Checkpoints(folder, other).restore_params(other.init(jnp.float32(0)))
        >>> float(state.params)
        3.0

        Args:
          state: a state of the step.
          step: one of ``steps()``; ``None`` takes the latest that is whole.

        Raises:
          ArgumentError, ArgumentTypeError: there is none of this step, the state is not of this
            one's step, or another process restores another checkpoint.
          CheckpointDamagedError: there are checkpoints, and none is whole.
          CheckpointError: there is none, or the folder cannot be read.
          CheckpointMismatchError: the parameters have other names, shapes or dtypes, or differ
            between groups that this step has not.
        """
        if step is not None:
            _check.whole_number("step", step, least=0, hint="It is one of steps().")
        with entering_of(self._step, "restore"):
            found = self._found(state, step, only_params=True)
        if found is None:
            raise CheckpointError(f"{self._folder.path} has no checkpoint to take parameters from.")
        return with_params(self._step, state, found.state.params, found.state.frozen)

    def steps(self) -> list[int]:
        """Return the numbers of the complete checkpoints, ascending.

        Each is the number of steps after which it was saved, or a higher one if that was taken. If
        there are several processes, all of them call this.

        Raises:
          CheckpointError: the folder cannot be read.
        """
        return self._folder.numbers(self._step.mesh)

    def scores(self) -> dict[int, float]:
        """Return the scores that complete checkpoints were saved with, by their ``steps()``.

        If there are several processes, all of them call this.

        Raises:
          CheckpointError: the folder cannot be read.
        """
        return self._saving.scores(self.steps())

    def _restored(
        self, state: TrainState, step: int | None, strict: bool, best: bool = False
    ) -> tuple[TrainState, Any, int, float] | None:
        _check.flag("strict", strict)
        with entering_of(self._step, "restore"):
            found = self._found(state, step, strict=strict, best=best)
            self._may_write = True
            if found is None:
                return None
            self.restored_from = found.source.name
            PROGRESS.restored(int(found.state.step), self.restored_from)
            if found.notes:
                warnings.warn(
                    f"{found.source.name} is of a step that differs: {'; '.join(found.notes)}.",
                    CheckpointWarning,
                    # Of the caller of restore or restore_latest.
                    stacklevel=3,
                )
            data = found.data.of_process(self._step.mesh)
            return self._step.reshard(found.state), data, found.source.number, found.score

    def _found(
        self, state: TrainState, step: int | None, *, strict: bool = True, **which: bool
    ) -> Found | None:
        """Read a checkpoint, or the latest that is whole; return ``None`` if there is none."""
        only_params, best = which.get("only_params", False), which.get("best", False)
        call = "restore_params" if only_params else "restore"
        _check_call(call, state, jax.Array, jax.ShapeDtypeStruct)
        layout = layout_of(self._step, state)
        here = None if only_params else self._fingerprint(layout)
        types = jax.eval_shape(layout.collected, state)
        if not only_params:
            self._compile_beside(layout, types)
        self._saving.wait()
        # What follows may be another state after as many steps as one that is kept.
        self._saving.taken = None
        snapshots: list[Source] = []
        if self._snapshots is not None:
            self._snapshots.forget_count()
            if step is None and not (only_params or best):
                snapshots = [each for _, each in self._snapshots.candidates()]
        reasons: dict[int, str] = {}
        deleted = 0
        while True:
            numbers = self._saving.numbers = self.steps()
            # A run that writes meanwhile may have deleted what was being read, and has newer ones.
            deleted += len(reasons.keys() - set(numbers))
            reasons = {each: why for each, why in reasons.items() if each in numbers}
            if step is not None and step not in numbers:
                there = ", ".join(map(str, numbers)) or "none"
                raise ArgumentError(
                    f"{self._folder.path} has no checkpoint {step}; it has {there}."
                )
            if deleted > _MOST_DELETED or (deleted and not numbers):
                raise CheckpointError(
                    f"Each checkpoint in {self._folder.path}, {deleted} so far, was deleted while "
                    f"it was read. If another run writes there, let that one keep more of them: "
                    f"Checkpoints(folder, step, keep=10)."
                )
            self._saving.damaged |= reasons.keys()
            left = [each for each in numbers if each not in reasons and step in (None, each)]
            scores = self._saving.scores(numbers) if best else dict.fromkeys(left, 0.0)
            left = sorted(scores.keys() & left, key=lambda each: (scores[each], each))
            if not left and not snapshots:
                break
            # The same in all processes. Of a snapshot and a checkpoint of one number the former.
            in_memory = bool(snapshots) and snapshots[-1].number >= max(left, default=-1)
            source = snapshots.pop() if in_memory else OnDisk(self._folder, left[-1])
            try:
                found = read_state(source, layout.without_owners, types, here, strict=strict)
            except Damaged as damage:
                if in_memory:
                    warnings.warn(
                        f"{source.name}: {damage}. It is passed over.",
                        CheckpointWarning,
                        stacklevel=4,
                    )
                else:
                    reasons[source.number] = str(damage)
                continue
            for each, why in reasons.items():
                warnings.warn(
                    f"{self._folder.path}, checkpoint {each}: {why}. It is damaged and passed "
                    f"over; {'snapshot' if in_memory else 'checkpoint'} {source.number} is taken.",
                    CheckpointWarning,
                    stacklevel=3 if only_params else 4,
                )
            return found._replace(score=scores.get(source.number, 0.0))
        if not reasons:
            return None
        what, whole = f"No checkpoint{' with a score' if best else ''}", "is whole"
        if step is not None:
            what, whole = f"Checkpoint {step}", "is not whole"
        whys = "; ".join(f"checkpoint {each}: {why}" for each, why in reasons.items())
        raise CheckpointDamagedError(
            f"{what} in {self._folder.path} {whole}: {whys}. Bring back a copy of it, take another "
            f"one of steps(), or choose another folder to start again in."
        )

    def _compile_beside(self, layout: StateLayout, types: TrainState) -> None:
        """Begin to compile what the first save or snapshot runs, if nothing has."""
        if not self._compiles:
            self._compiles = True
            compile_copies(layout.without_owners, types)

    def _fingerprint(self, layout: StateLayout) -> Fingerprint:
        # Kept, since it traces the optimizer, and a loop saves states of one layout, which the step
        # keeps.
        if id(layout) not in self._fingerprints:
            with _mesh.without_mesh():
                found = fingerprint(config_of(self._step), layout.params)
            self._fingerprints[id(layout)] = found
        return self._fingerprints[id(layout)]


def _check_call(call: str, state: Any, *kinds: type) -> None:
    """Raise unless this is outside of a trace, and the state's leaves are of these kinds."""
    _check_at_top_level(call)
    check_state(state)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(x, kinds):
            raise ArgumentTypeError(
                f"state{jax.tree_util.keystr(path)} must lie on the devices of the step; got "
                f"{type(x).__name__}. Pass a state that init, restore_latest or a step returned."
            )


def _check_at_top_level(call: str) -> None:
    if not _jax.at_top_level():
        raise ArgumentError(
            f"{call} works with files, which a function that jax traces cannot do. Call it outside "
            f"of jax.jit."
        )
