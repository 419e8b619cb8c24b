"""Agreement: compares what the processes of a mesh do, through their coordinator."""

import collections
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard import _jax
from crossshard._hash import crc32
from crossshard._typed import typed
from crossshard.distributed.progress import PROGRESS, waiting
from crossshard.errors import ArgumentError, DistributedError

# Where nobody watches the processes, since the script has connected them by JAX's own call.
_UNWATCHED_SECONDS = 600.0
# Where the watch ends all of them before.
_FOR_EVER = 1e6
# Characters of what one process tells.
_LONGEST = 1 << 24

# The number of exchanges of each set of processes; the same in all of them.
_exchanges: collections.Counter[tuple[int, ...]] = collections.Counter()


def check_agreement(
    call: str, given: Callable[[], Mapping[str, str]], mesh: Mesh, mend: str
) -> None:
    """Raise, in every process of the mesh, unless all of them passed the same.

    Nothing is sent if all devices of the mesh belong to one process.

    Args:
      call: the name of the call that every process makes.
      given: returns a text for each argument, by name; not called if there is one process.
      mesh: the mesh.
      mend: a sentence that names what to write instead.

    Raises:
      ArgumentError: a process passed something else, or has not reached this call.
    """
    found = compare(call, given, mesh)
    if found is not None:
        raise ArgumentError(
            f"To {call}, process {found.odd[0]} passed {found.name} {found.passed}, and "
            f"process {found.other} {found.expected}. {mend}"
        )


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """How the processes of a mesh differ.

    Attributes:
      name: what they do not agree on.
      odd: the processes that differ from most of the others, or from the first.
      passed: what the first of these passed.
      other: the first process that passed what most did.
      expected: what it passed.
    """

    name: str
    odd: tuple[int, ...]
    passed: str
    other: int
    expected: str


def compare(call: str, given: Callable[[], Mapping[str, str]], mesh: Mesh) -> Disagreement | None:
    """What the processes of a mesh do not agree on, the same in all of them; ``None`` without it.

    Args:
      call: the name of the call that every process makes.
      given: returns a text for each of its arguments, by name; not called if there is one process.
      mesh: the mesh.

    Raises:
      ArgumentError: a process has not reached this call, or is at another one.
    """
    processes = processes_of(mesh)
    if len(processes) == 1:
        return None
    texts = exchange(call, json.dumps(dict(given())), mesh)
    told = [_read(dict[str, str], *each) for each in zip(texts, processes, strict=False)]
    for name in sorted({name for each in told for name in each}):
        passed = [each.get(name, "nothing") for each in told]
        # The first of the most common ones, so that of two processes the second is odd.
        common = collections.Counter(passed).most_common(1)[0][0]
        odd = [place for place, each in enumerate(passed) if each != common]
        if odd:
            other = processes[passed.index(common)]
            places = tuple(processes[place] for place in odd)
            return Disagreement(name, places, passed[odd[0]], other, common)
    return None


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a process tells: the call that it makes, and a text."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What the first process answers: each text once, and which one is whose; or what is wrong."""

    wrong: str
    texts: list[str]
    whose: list[int]


def exchange(call: str, text: str, mesh: Mesh, within: str = "") -> tuple[str, ...]:
    """What each process of the mesh passed, in the order of the processes; in every process.

    The first process reads what all have told, and the others read its answer. Nothing is sent if
    all devices of the mesh belong to one process.

    Args:
      call: the name of the call that every process makes.
      text: what this process passes.
      mesh: the mesh.
      within: what the others may take longer for than for a call, by its name among the timeouts.

    Raises:
      ArgumentError: a process has not reached this call, or is at another one.
    """
    processes = processes_of(mesh)
    this = jax.process_index()
    if len(processes) == 1 or this not in processes or not _jax.has_coordinator():
        return (text,)
    of_all = len(processes) == jax.process_count()
    # The watch compares only what all processes of the job enter.
    with waiting(call, within) if of_all else contextlib.nullcontext():
        answer = _exchanged(_Call(call, text), processes, _patience(within or call, of_all=of_all))
    if answer.wrong:
        raise ArgumentError(
            f"{answer.wrong} Every process of a mesh must make the same calls, in the same order."
        )
    return tuple(answer.texts[which] for which in answer.whose)


def _patience(call: str, *, of_all: bool) -> float:
    """For how many seconds the first process waits for each of the others."""
    if PROGRESS.seconds is None:
        return _UNWATCHED_SECONDS
    # Nobody watches the processes of a smaller mesh, which may compile.
    return _FOR_EVER if of_all else max(PROGRESS.seconds(call), _UNWATCHED_SECONDS)


def _exchanged(own: _Call, processes: tuple[int, ...], seconds: float) -> _Answer:
    """What the first process answers to all; it has waited for each of the others for so long."""
    this = jax.process_index()
    _exchanges[processes] += 1
    number, folder = _exchanges[processes], f"crossshard/{crc32(repr(processes))}"
    if this == processes[0]:
        answer = _gathered(f"{folder}/{number}", own, processes, seconds)
        _tell(f"{folder}/{number}/answer", answer)
        # Who has come here has read everything of the exchange before.
        _jax.forget(f"{folder}/{number - 1}")
        return answer
    _tell(f"{folder}/{number}/{this}", own)
    told = _jax.told_by_processes(f"{folder}/{number}/answer", 2 * seconds)
    if told is None:
        return _Answer(_missing(processes[0], own.name, 2 * seconds), [], [])
    found: _Answer = _read(_Answer, told, processes[0])
    return found


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The indices of the processes that have devices of a mesh, in ascending order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def _gathered(key: str, own: _Call, processes: tuple[int, ...], seconds: float) -> _Answer:
    """What all processes have told, or which one is at another call or at none."""
    texts = [own.text]
    for process in processes[1:]:
        told = _jax.told_by_processes(f"{key}/{process}", seconds)
        if told is None:
            return _Answer(_missing(process, own.name, seconds), [], [])
        its = _read(_Call, told, process)
        if its.name != own.name:
            wrong = f"Process {process} is at {its.name}, and process {processes[0]} at {own.name}."
            return _Answer(wrong, [], [])
        texts.append(its.text)
    each_once = list(dict.fromkeys(texts))
    return _Answer("", each_once, [each_once.index(text) for text in texts])


def _tell(key: str, what: _Call | _Answer) -> None:
    _jax.tell_processes(key, json.dumps(dataclasses.asdict(what)))


def _read(kind: Any, text: str, process: int) -> Any:
    """What a process told; whoever reaches the coordinator can write there."""
    try:
        return typed(kind, json.loads(text if len(text) <= _LONGEST else ""))
    except (ValueError, RecursionError):
        raise DistributedError(
            f"What the coordinator holds for process {process} is not what crossshard wrote: "
            f"{text!r:.80}. Another job may use the same coordinator."
        ) from None


def _missing(process: int, call: str, seconds: float) -> str:
    return f"Process {process} has not reached {call} in {seconds:g} seconds."
