"""What a run leaves behind, written as it happens."""

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
    """The folder of a run: ``metrics.jsonl``, a line for every step, and whole files beside it.

    Args:
      asked: the folder; ``None`` for a fresh one under ``runs/``.
      fail: is told, in a sentence, what cannot be written later on. The rest is still tried.

    Attributes:
      folder: where it is.
      steps: all that were added.
      written: the names of the files that are whole.

    Raises:
      ArgumentError: the folder or the first file in it cannot be made.
    """

    def __init__(self, asked: Path | None, fail: Callable[[str], None]) -> None:
        self.folder = make_folder(asked)
        self.steps: list[Step] = []
        self.written = [_METRICS]
        self._fail = fail
        self._size = 0
        try:
            # Unbuffered: what a full disk does not take must not wait for the end.
            self._metrics = (self.folder / _METRICS).open("xb", buffering=0)
        except OSError as error:
            raise ArgumentError(cannot_write(self.folder / _METRICS, error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._metrics.close()

    def add(self, step: Step, tokens: int) -> None:
        """A line for a step of so many tokens, handed to the system when this returns."""
        self.steps.append(step)
        values: dict[str, Any] = {
            "step": step.number,
            "loss": step.loss,
            "bits_per_byte": step.bits_per_byte,
            "loss_per_shard": step.losses,
            "seconds": round(step.seconds, 6),
            "tokens_per_second": round(tokens / step.seconds, 1),
        }
        if step.held_out is not None:
            values["held_out_bits_per_byte"] = step.held_out
        line = f"{_json(values)}\n".encode()
        try:
            if self._metrics.write(line) < len(line):
                # Half a line would be no line of JSON.
                self._metrics.truncate(self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(line)
        except OSError as error:
            self._fail(cannot_write(self.folder / _METRICS, error))

    def write_json(self, name: str, value: "DataclassInstance") -> None:
        """A dataclass as a JSON file of its own."""
        self.write(name, f"{_json(dataclasses.asdict(value), indent=2)}\n".encode())

    def write(self, name: str, content: bytes) -> None:
        """A whole file, or none: one that was there stays as it was where this fails."""
        path, part = self.folder / name, self.folder / f"{name}.part"
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            self._fail(cannot_write(path, error))
        else:
            self.written = [*dict.fromkeys([*self.written, name])]


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, default=str)


def _finite(value: Any) -> Any:
    """``value`` with null for numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
