"""The processes of a run: the rows that this one passes, and what all of them know."""

import dataclasses
import signal
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import crossshard


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that train together; one by default.

    Attributes:
      number: how many there are.
      own: which of them this is. Process 0 prints, and writes the files.
    """

    number: int = 1
    own: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is process 0."""
        return self.own == 0

    def largest(self, value: int) -> int:
        """The largest value that a process passes; all of them must call this."""
        if self.number == 1:
            return value
        return int(multihost_utils.process_allgather(np.int32(value)).max())

    def equal_rows(self, batch: Any) -> Any:
        """As many rows of a global batch as every process has, filled up with zeros."""
        if self.number == 1:
            return batch
        cut = lambda rows: np.split(filled(rows, jax.device_count()), self.number)[self.own]
        return jax.tree.map(cut, batch)


ALONE = Processes()


def connect() -> Processes:
    """Find the other processes of this run, and connect with them."""
    job = crossshard.distributed.initialize()
    # JAX has taken it to tell of preemptions, and would swallow it until the training begins.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return Processes(job.num_processes, job.process_id)


def filled(rows: np.ndarray, multiple: int) -> np.ndarray:
    """The rows, and rows of zeros up to a multiple of a number."""
    return np.pad(rows, ((0, -len(rows) % multiple), (0, 0)))


def whole(array: jax.Array) -> np.ndarray:
    """All of an array, of which other processes may hold a part; all of them must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.array(array)
    return np.array(multihost_utils.process_allgather(array, tiled=True))
