"""Writes the files of a run, while it trains."""

import dataclasses
import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from crossshard.errors import ArgumentError
from examples.byte_lm.folder import cannot_write, make_folder
from examples.byte_lm.loop import Step

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_METRICS = "metrics.jsonl"


class Record:
    """The folder of a run: ``metrics.jsonl``, a line for every step, and other files.

    Args:
      asked: the folder; ``None`` for a fresh one under ``runs/``.
      fail: called with a message if a later write fails. Other writes are still tried.
      silent: write nothing, since another process does.
      resume: go on with the run whose folder it is, if it has begun.

    Attributes:
      folder: its path.
      steps: the steps added so far.
      written: the names of the complete files.

    Raises:
      ArgumentError: the folder or its first file cannot be created.
    """

    def __init__(
        self,
        asked: Path | None,
        fail: Callable[[str], None],
        *,
        silent: bool = False,
        resume: bool = False,
    ) -> None:
        self._silent = silent
        self.folder = Path(os.devnull).parent if silent else make_folder(asked)
        self.steps: list[Step] = []
        self.written = [_METRICS]
        self._fail = fail
        self._size = 0
        self._before = _lines(asked / _METRICS) if asked is not None and resume else []
        try:
            # Unbuffered, so that a full disk shows at once.
            path = Path(os.devnull) if silent else self.folder / _METRICS
            goes_on = path.exists() and resume
            self._metrics = path.open("wb" if silent else "r+b" if goes_on else "xb", buffering=0)
        except OSError as error:
            raise ArgumentError(cannot_write(self.folder / _METRICS, error)) from None

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
        self.steps = [Step.from_json(json.loads(line)) for line in kept]
        self._size = sum(map(len, kept))
        if not self._silent:
            self._metrics.truncate(self._size)
            self._metrics.seek(self._size)

    def add(self, step: Step, tokens: int) -> None:
        """Append a step of this many tokens to metrics.jsonl, unbuffered."""
        self.steps.append(step)
        values: dict[str, Any] = {
            "step": step.number,
            "loss": step.loss,
            "bits_per_byte": step.bits_per_byte,
            "loss_per_shard": step.losses,
            "seconds": round(step.seconds, 6),
            "tokens_per_second": round(tokens / step.seconds, 1),
            **{name: each if each[1:] else each[0] for name, each in step.metrics.items()},
        }
        if step.faults:
            values["faults"] = step.faults
        if step.held_out is not None:
            values["held_out_bits_per_byte"] = step.held_out
        if step.held_out_ema is not None:
            values["held_out_bits_per_byte_ema"] = step.held_out_ema
        line = f"{_json(values)}\n".encode()
        try:
            if self._metrics.write(line) < len(line):
                # Half a line is not valid JSON.
                self._metrics.truncate(self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(line)
        except OSError as error:
            self._fail(cannot_write(self.folder / _METRICS, error))

    def write_json(self, name: str, value: "DataclassInstance") -> None:
        """Write a dataclass to its own JSON file."""
        self.write(name, f"{_json(dataclasses.asdict(value), indent=2)}\n".encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically: on failure an existing file stays unchanged."""
        if self._silent:
            return
        path, part = self.folder / name, self.folder / f"{name}.part"
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            self._fail(cannot_write(path, error))
        else:
            self.written = [*dict.fromkeys([*self.written, name])]


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
