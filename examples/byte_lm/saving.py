"""The checkpoints of a run: saves its state now and then, and goes on from the latest."""

import hashlib
from collections.abc import Callable
from typing import Any

import crossshard
from crossshard.errors import ArgumentError, CheckpointError
from examples.byte_lm.job import Job
from examples.byte_lm.training import Training

FOLDER = "checkpoints"


class Saving:
    """Saves a run's state in its folder, if it was asked for, until it is closed.

    Args:
      job: the run.
      training: its step, with its state.
      fail: called with a message if a checkpoint cannot be written.
    """

    def __init__(self, job: Job, training: Training, fail: Callable[[str], None]):
        options = job.options
        self._every = options.save_every
        self._training = training
        self._fail = fail
        self._latest = 0
        self._drawn = {
            "text": hashlib.sha256(job.text.training.tobytes()).hexdigest(),
            "seed": options.seed,
            "rows": job.rows,
            "context": options.context,
            "weight": options.weight,
        }
        self._checkpoints: crossshard.Checkpoints | None = None
        if options.out is not None and (options.save_every or options.resume):
            self._checkpoints = crossshard.Checkpoints(options.out / FOLDER, training.step)

    def close(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._checkpoints is not None:
            self._tried(self._checkpoints.close)

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
        """Save the state after so many steps, if it is time to, or these are the last ones."""
        checkpoints, state = self._checkpoints, self._training.state
        if checkpoints is None or not self._every or steps == self._latest:
            return
        if last or steps % self._every == 0:
            data: Any = {"steps": steps, "batches": self._drawn}
            if self._tried(lambda: checkpoints.save(state, data)):
                self._latest = steps

    def _tried(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except CheckpointError as error:
            self._fail(str(error))
            return False
        return True
