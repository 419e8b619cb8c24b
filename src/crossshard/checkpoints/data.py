"""Data: where the data of a run stands: JSON, or in each process JSON with states of iterators."""

import base64
import contextlib
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

# What to write where processes pass other data.
PASS_THE_SAME = "Every process passes the same; where all of them stand is one dict."


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the data stands, as a manifest has it."""

    json: Any  # what the user passed, if that is JSON
    # With iterators, what each process has passed, in their order, as texts; see ``_told``.
    iterators: list[str] | None = None

    def misfit(self, mesh: Mesh) -> str | None:
        """Return why not each process of a mesh has data, its own or that of all, or None."""
        told, here = self.iterators, len(processes_of(mesh))
        if told is None or len(told) == here or len({*told}) == 1:
            return None
        return (
            f"the iterators of its {len(told)} processes have different states, or other JSON "
            f"beside them, and here are {here} processes"
        )

    def of_process(self, mesh: Mesh) -> Any:
        """Return what this process saved, with states in the places of iterators, if it fits."""
        if self.iterators is None or self.misfit(mesh):
            return self.json
        processes = processes_of(mesh)
        place = processes.index(jax.process_index()) if len(processes) > 1 else 0
        return _back(json.loads(self.iterators[place % len(self.iterators)]))

    def check(self) -> None:
        """Raise ValueError or TypeError unless the texts are what was written."""
        for text in self.iterators or ():
            _back(json.loads(text))


def data_of(given: Any, mesh: Mesh) -> Data:
    """Return where the data stands, given JSON, in which iterators may be, in each process.

    Raises:
      ArgumentError: JSON would return something else, it is too large, or processes pass others.
      ArgumentTypeError: there are values that JSON does not know.
    """
    if not _has_iterator(given):
        # A copy, since it is written later, and the loop goes on to change it.
        return Data(json.loads(_as_json("data", given)))
    told = json.dumps(_told(given))
    number = len(processes_of(mesh))
    if len(told) * number > MOST_BYTES // 2:
        raise ArgumentError(
            f"The state of the iterator has {len(told):,} bytes, and those of all processes may "
            f"have {MOST_BYTES // 2:,}. Let it keep positions and seeds, and no examples."
        )
    return Data(None, list(exchange("save an iterator", told, mesh, within="save")))


def _is_iterator(given: Any) -> bool:
    return all(callable(getattr(given, each, None)) for each in ("get_state", "set_state"))


def _has_iterator(given: Any) -> bool:
    """Return whether it is an iterator, or JSON with one in it."""
    others: list[Any] = []
    # What is no JSON in another way is refused later, in words.
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        json.dumps(given, default=others.append)
    return any(map(_is_iterator, others))


def _told(given: Any) -> list[Any]:
    """Return as JSON what ``_back`` makes the same of, with states in the places of iterators."""
    if _is_iterator(given):
        if is_read_ahead(given):
            raise ArgumentError(
                f"{_check.described(given)} is read ahead by step.prefetch, so its state is that "
                f"of a batch that no step has taken. Pass what step.prefetch has returned."
            )
        state = given.get_state()
        if isinstance(state, bytes):
            return ["bytes", base64.b64encode(state).decode()]
        return ["json", json.loads(_as_json("The state of the iterator", state))]
    if type(given) in (list, tuple) and _has_iterator(given):
        return [type(given).__name__, [_told(each) for each in given]]
    if isinstance(given, dict) and _has_iterator(given):
        _as_json("data", dict.fromkeys(given))
        return ["dict", {key: _told(each) for key, each in given.items()}]
    return ["json", json.loads(_as_json("data", given))]


def _back(told: Any) -> Any:
    """Undo ``_told``."""
    kind, value = told
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    if kind in ("list", "tuple"):
        found = [_back(each) for each in value]
        return found if kind == "list" else tuple(found)
    if kind == "dict":
        return {key: _back(each) for key, each in dict(value).items()}
    return value


def _as_json(what: str, value: Any) -> str:
    """Return a value as JSON, which returns it as it was given."""
    advice = "Write numbers, strings, lists and dicts with strings as keys, as in {'epoch': 3}."
    advice += " An iterator has get_state and set_state." * (what == "data")
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
