"""The checkpoints of a run: saves its state now and then, and goes on from the latest."""

import hashlib
import shutil
from typing import Any

import crossshard
from crossshard.errors import ArgumentError
from examples.byte_lm.job import Job
from examples.byte_lm.stopping import Stopping
from examples.byte_lm.training import Training

FOLDER = "checkpoints"


class Saving:
    """Saves a run's state in its folder, if it was asked for, until it is closed.

    Args:
      job: the run.
      training: its step, with its state.
      stopping: told if a checkpoint cannot be written.
    """

    def __init__(self, job: Job, training: Training, stopping: Stopping) -> None:
        options = job.options
        self._every = options.save_every
        self._compared_every = options.check_divergence or 0
        self._is_first = job.processes.is_first
        self._training = training
        self._stopping = stopping
        self._latest = 0
        self._drawn = {
            "text": hashlib.sha256(job.text.training.tobytes()).hexdigest(),
            "seed": options.seed,
            "rows": job.rows,
            "context": options.context,
            "weight": options.weight,
        }
        self._checkpoints: crossshard.Checkpoints | None = None
        self._memory, self._memory_every = options.memory, options.memory_every
        if options.out is not None and (options.save_every or options.resume or options.memory):
            self._folder = options.out / FOLDER
            keep = _kept(options.check_divergence, options.save_every)
            self._checkpoints = crossshard.Checkpoints(
                self._folder,
                training.step,
                keep,
                memory=options.memory,
                memory_every=1,
                memory_copies=options.memory_copies,
            )

    def close(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._checkpoints is not None:
            with self._stopping.writing(FOLDER):
                self._checkpoints.close()

    @property
    def source(self) -> str:
        """What the run goes on from, such as ``"Checkpoint 3 in /my/run"``."""
        return "" if self._checkpoints is None else self._checkpoints.restored_from

    def resume(self) -> int:
        """Go on from the latest checkpoint; the number of steps that were taken before it.

        Raises:
          ArgumentError: that run drew other batches.
          CheckpointError: it is another model's or optimizer's, or none is whole.
        """
        if self._checkpoints is None:
            return 0
        found = self._checkpoints.restore_latest(self._training.state)
        if found is None:
            return 0
        state, data = found
        for name, value in self._drawn.items():
            if data["batches"][name] != value:
                raise ArgumentError(
                    f"The run to resume drew batches with {name} {data['batches'][name]}, and this "
                    f"one would with {value}. Pass what it was given, or name a new --out folder."
                )
        self._training.state = state
        self._latest = int(data["steps"])
        return self._latest

    def after(self, steps: int, *, last: bool = False) -> None:
        """Save the state after so many steps, if it is time to, or these are the last ones.

        Not if its parameters are not finite, or differ between shards.
        """
        checkpoints, state = self._checkpoints, self._training.state
        if checkpoints is None or steps == self._latest:
            return
        saves = self._every and (last or steps % self._every == 0)
        keeps = self._memory is not None and steps % self._memory_every == 0
        if not (saves or keeps):
            return
        if self._training.differs is None and self._training.is_finite:
            data: Any = {"steps": steps, "batches": self._drawn}
            with self._stopping.writing(FOLDER):
                if not saves:
                    return checkpoints.snapshot(state, data)
                checkpoints.save(state, data)
                self._latest = steps

    def after_fault(self, steps: int) -> str:
        """Save the state at which a fault has ended the run, if it is good; say how to go on.

        Checkpoints that may hold a wrong copy are put aside.
        """
        self.after(steps, last=True)
        self.close()
        if not self._every:
            return "Nothing was saved, since that takes --save-every."
        if self._training.differs is not None:
            return self._put_aside(self._training.differs - self._compared_every)
        if self._latest == steps:
            return f"Saved after step {steps}: --resume goes on from there."
        why = "They were not saved"
        if not self._training.is_finite:
            why = "But an update made parameters infinite, which are not saved"
        then = f"--resume goes on from step {self._latest}" if self._latest else "start again"
        return f"{why}: {then}."

    def _put_aside(self, good: int) -> str:
        """Rename the checkpoints of later steps than this one, since --resume takes the latest."""
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)
        found = {int(path.name): path for path in self._folder.iterdir() if path.name.isdigit()}
        doubtful = sorted(number for number in found if number > good)
        for number in doubtful if self._is_first else []:
            aside = found[number].with_suffix(".doubtful")
            shutil.rmtree(aside, ignore_errors=True)
            found[number].rename(aside)
        kept = [number for number in found if number <= good]
        then = f"--resume goes on from checkpoint {max(kept)}" if kept else "start again"
        doubt = f", and checkpoints {', '.join(map(str, doubtful))} renamed" if doubtful else ""
        return f"It was not saved{doubt}: {then}."


def _kept(compared_every: int | None, saved_every: int | None) -> int:
    """So many checkpoints that one of them is of a state whose copies have been compared."""
    if compared_every is None or saved_every is None:
        return 3
    # An error comes two steps after the comparison that finds it.
    return max(3, (compared_every + 1) // saved_every + 2)
