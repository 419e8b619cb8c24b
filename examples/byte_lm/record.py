"""What a run leaves behind, written as it happens."""

import dataclasses
import json
import math
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from examples.byte_lm.loop import Step
from examples.byte_lm.output import cannot_write

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Record:
    """The folder of a run: ``metrics.jsonl``, a line for every step, and JSON files beside it.

    Args:
      out: the folder; made if it is not there.

    Raises:
      ArgumentError: it cannot be made or written to, now or later.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.steps: list[Step] = []
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._metrics = (out / "metrics.jsonl").open("x", encoding="utf-8")
        except OSError as error:
            raise cannot_write(out, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.close()

    def add(self, step: Step, tokens: int) -> None:
        """A line for a step of so many tokens, on the disk when this returns."""
        self.steps.append(step)
        line: dict[str, Any] = {
            "step": step.number,
            "loss": step.loss,
            "bits_per_byte": step.bits_per_byte,
            "loss_per_shard": step.losses,
            "seconds": round(step.seconds, 6),
            "tokens_per_second": round(tokens / step.seconds, 1),
        }
        if step.held_out is not None:
            line["held_out_bits_per_byte"] = step.held_out
        try:
            self._metrics.write(_json(line) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise cannot_write(self.out / "metrics.jsonl", error) from None

    def write(self, name: str, value: "DataclassInstance") -> None:
        """A dataclass as a JSON file of its own."""
        text = _json(dataclasses.asdict(value), indent=2)
        try:
            (self.out / name).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.out / name, error) from None


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, default=str)


def _finite(value: Any) -> Any:
    """``value`` with null for numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
