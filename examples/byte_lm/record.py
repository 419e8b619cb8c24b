"""The folder of a run, and the files that it writes there while it trains."""

import contextlib
import dataclasses
import datetime
import errno
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from crossshard.errors import ArgumentError
from examples.byte_lm.options import TrainOptions
from examples.byte_lm.stopping import Stopping

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_RUNS = Path("runs")
_METRICS = "metrics.jsonl"

# A line of metrics.jsonl. After most steps there are no looks at held-out text, and no faults.
Step = dict[str, Any]
_FIXED = {
    "step",  # counted from 1
    "loss",  # nats per byte, the mean over all bytes that count
    "bits_per_byte",  # the same in bits
    "loss_per_shard",  # each shard's mean over its part of the batch
    "seconds",  # from the batch to the loss
    "tokens_per_second",
    "faults",  # what was found not to be finite, or to differ between shards
    "held_out_bits_per_byte",  # of a sample of held-out text
    "held_out_bits_per_byte_ema",  # the same with the moving average of the parameters
}


def metrics_of(step: Step) -> dict[str, Any]:
    """The metrics of the stages, a number each."""
    return {name: value for name, value in step.items() if name not in _FIXED}


class Record:
    """The folder of a run: ``metrics.jsonl``, a line for every step, and other files.

    Args:
      options: those of the run: its folder, and whether it goes on with the run that is there.
      stopping: told if a later write fails. Other writes are still tried.
      silent: write nothing, since another process does.

    Attributes:
      folder: its path.
      steps: the steps added so far.
      written: the names of the complete files.

    Raises:
      ArgumentError: the folder or its first file cannot be created.
    """

    def __init__(self, options: TrainOptions, stopping: Stopping, *, silent: bool = False) -> None:
        self.steps: list[Step] = []
        self.written = [_METRICS]
        self._stopping = stopping
        self._silent = silent
        self._size = 0
        self._before = _lines(options.out / _METRICS) if options.out and options.resume else []
        try:
            self.folder = Path(os.devnull).parent if silent else _make_folder(options.out)
            path = Path(os.devnull) if silent else self.folder / _METRICS
            goes_on = path.exists() and options.resume
            # Unbuffered, so that a full disk shows at once.
            self._metrics = path.open("wb" if silent else "r+b" if goes_on else "xb", buffering=0)
        except OSError as error:
            raise ArgumentError(f"Cannot write to {error.filename}: {error.strerror}.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._metrics.close()

    def keep(self, number: int) -> None:
        """Keep the first steps of the run that is resumed, and forget those after them.

        Raises:
          ArgumentError: there are not so many.
        """
        if len(self._before) < number:
            raise ArgumentError(
                f"{self.folder / _METRICS} has {len(self._before)} steps, and the checkpoint was "
                f"saved after {number}. Name a new --out folder."
            )
        kept = self._before[:number]
        # In JSON there is no number for a loss that is not finite.
        self.steps = [json.loads(line.replace(b" null", b" NaN")) for line in kept]
        self._size = sum(map(len, kept))
        if not self._silent:
            self._metrics.truncate(self._size)
            self._metrics.seek(self._size)

    def add(self, step: Step) -> None:
        """Append a step to metrics.jsonl, unbuffered."""
        self.steps.append(step)
        line = f"{_json(step)}\n".encode()
        with self._stopping.writing(self.folder / _METRICS):
            if self._metrics.write(line) < len(line):
                # Half a line is not valid JSON.
                self._metrics.truncate(self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(line)

    def write_json(self, name: str, value: "DataclassInstance") -> None:
        """Write a dataclass to its own JSON file."""
        self.write(name, f"{_json(dataclasses.asdict(value), indent=2)}\n".encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically: on failure an existing file stays unchanged."""
        if self._silent:
            return
        path, part = self.folder / name, self.folder / f"{name}.part"
        with self._stopping.writing(path):
            try:
                part.write_bytes(content)
                part.replace(path)
                self.written = [*dict.fromkeys([*self.written, name])]
            finally:
                part.unlink(missing_ok=True)


def check_free(out: Path | None) -> None:
    """Raise an ``ArgumentError`` if there are files in the folder; creates nothing."""
    with contextlib.suppress(OSError):  # making it says why
        if out is not None and any(out.iterdir()):
            raise ArgumentError(
                f"{out} holds files, and files are not overwritten. Name a new --out folder."
            )


def _make_folder(asked: Path | None) -> Path:
    """Create it; without one a fresh one, called by the time."""
    out = asked or _RUNS / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=asked is not None)
    return out


def _lines(path: Path) -> list[bytes]:
    """The complete lines of a file; the last one may have been cut off with the run."""
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, default=str)


def _finite(value: Any) -> Any:
    """``value`` with null for non-finite numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
