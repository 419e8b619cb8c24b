"""Data: where the data of a run stands: JSON, or the state of the iterator of each process."""

import base64
import dataclasses
import json
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard import _check
from crossshard.checkpoints.folder import MOST_BYTES
from crossshard.distributed.agreement import exchange, processes_of
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.step.prefetch import is_read_ahead


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the data stands, as a manifest has it."""

    json: Any  # what the user passed, if that is JSON
    # Otherwise the states of iterators, in the order of the processes, as texts; see ``_told``.
    iterators: list[str] | None = None

    def misfit(self, mesh: Mesh) -> str | None:
        """Return why not each process of a mesh has a state, its own or that of all, or None."""
        states, here = self.iterators, len(processes_of(mesh))
        if states is None or len(states) == here or len({*states}) == 1:
            return None
        return (
            f"the iterators of its {len(states)} processes have different states, and here are "
            f"{here} processes"
        )

    def of_process(self, mesh: Mesh) -> Any:
        """Return what the user saved, or the state of this process's iterator; None without one."""
        if self.iterators is None or self.misfit(mesh):
            return self.json
        processes = processes_of(mesh)
        place = processes.index(jax.process_index()) if len(processes) > 1 else 0
        return _state_of(self.iterators[place % len(self.iterators)])

    def check(self) -> None:
        """Raise ValueError or TypeError unless the states are what was written."""
        for text in self.iterators or ():
            _state_of(text)


def data_of(given: Any, mesh: Mesh) -> Data:
    """Return where the data stands, given JSON, or an iterator in each process of a mesh.

    Raises:
      ArgumentError: JSON would return something else, it is too large, or processes pass others.
      ArgumentTypeError: there are values that JSON does not know.
    """
    if not all(callable(getattr(given, each, None)) for each in ("get_state", "set_state")):
        # A copy, since it is written later, and the loop goes on to change it.
        return Data(json.loads(_as_json("data", given)))
    if is_read_ahead(given):
        raise ArgumentError(
            f"{_check.described(given)} is read ahead by step.prefetch, so its state is that of a "
            f"batch that no step has taken. Pass what step.prefetch has returned."
        )
    told = _told(given.get_state())
    number = len(processes_of(mesh))
    if len(told) * number > MOST_BYTES // 2:
        raise ArgumentError(
            f"The state of the iterator has {len(told):,} bytes, and those of all processes may "
            f"have {MOST_BYTES // 2:,}. Let it keep positions and seeds, and no examples."
        )
    return Data(None, list(exchange("save an iterator", told, mesh, within="save")))


def _told(state: Any) -> str:
    """Return the state of an iterator as a text."""
    if isinstance(state, bytes):
        return json.dumps(["bytes", base64.b64encode(state).decode()])
    return json.dumps(["json", json.loads(_as_json("The state of the iterator", state))])


def _state_of(text: str) -> Any:
    """Undo ``_told``."""
    kind, value = json.loads(text)
    return base64.b64decode(value, validate=True) if kind == "bytes" else value


def _as_json(what: str, value: Any) -> str:
    """Return a value as JSON, which returns it as it was given."""
    advice = "Write numbers, strings, lists and dicts with strings as keys, as in {'epoch': 3}."
    try:
        text = json.dumps(value, allow_nan=False)
        is_same = json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"{what} cannot be written as JSON: {error}. {advice}") from error
    if not is_same or len(text) > MOST_BYTES // 2:
        raise ArgumentError(
            f"{what} would not come back from JSON as it is, or is larger than {MOST_BYTES // 2:,} "
            f"bytes; got {value!r:.80}. {advice}"
        )
    return text
