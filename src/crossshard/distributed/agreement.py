"""Agreement: compares what the processes of a mesh do, through their coordinator."""

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard import _jax
from crossshard._hash import crc32
from crossshard._typed import typed
from crossshard.errors import ArgumentError, DistributedError

# A process may load its data, or compile, for minutes before it reaches the same line.
_SECONDS = 600
# Characters of what one process tells.
_LONGEST = 1 << 22

# The number of comparisons of each set of processes; the same in all of them.
_comparisons: collections.Counter[tuple[int, ...]] = collections.Counter()


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
    if found is not None and found.name is None:
        raise ArgumentError(f"{found.what} {_SAME_CALLS}")
    if found is not None:
        raise ArgumentError(
            f"To {call}, process {found.odd[0]} passed {found.name} {found.passed}, and "
            f"process {found.other} {found.expected}. {mend}"
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a process tells: the call that it makes, and a text for each argument."""

    name: str
    given: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """How the processes of a mesh differ.

    Attributes:
      what: which process is at another call, or at none; empty if all make the same call.
      name: what they do not agree on.
      odd: the processes that differ from most of the others, or from the first.
      passed: what the first of these passed.
      other: the first process that passed what most did.
      expected: what it passed.
    """

    what: str = ""
    name: str | None = None
    odd: tuple[int, ...] = ()
    passed: str = ""
    other: int = 0
    expected: str = ""


def compare(call: str, given: Callable[[], Mapping[str, str]], mesh: Mesh) -> Disagreement | None:
    """What the processes of a mesh do not agree on, the same in all of them; ``None`` without it.

    Args:
      call: the name of the call that every process makes.
      given: returns a text for each of its arguments, by name; not called if there is one process.
      mesh: the mesh.
    """
    processes = processes_of(mesh)
    this = jax.process_index()
    if len(processes) == 1 or this not in processes or not _jax.has_coordinator():
        return None
    key = _next_key(processes)
    mine = _Call(call, dict(given()))
    if this == processes[0]:
        found = _judge(_gathered(key, mine, processes), processes)
        _tell(f"{key}/verdict", found)
        if found is None:
            # Who has come here has read everything of the comparison before.
            _jax.forget(_key(processes, _comparisons[processes] - 1))
        return found
    _tell(f"{key}/{this}", mine)
    answer = _jax.told_by_processes(f"{key}/verdict", 2 * _SECONDS)
    if answer is None:
        return Disagreement(_missing(processes[0], call, 2 * _SECONDS))
    return _read(Disagreement | None, answer, processes[0])


def exchange(call: str, text: str, mesh: Mesh) -> tuple[str, ...]:
    """What each process of the mesh passed, in the order of the processes; in every process.

    Raises:
      ArgumentError: a process has not reached this call, or is at another one.
    """
    processes = processes_of(mesh)
    this = jax.process_index()
    if len(processes) == 1 or this not in processes or not _jax.has_coordinator():
        return (text,)
    key = _next_key(processes)
    _tell(f"{key}/{this}", _Call(call, {"text": text}))
    found = []
    for process in processes:
        told = _jax.told_by_processes(f"{key}/{process}", _SECONDS)
        if told is None:
            raise ArgumentError(f"{_missing(process, call, _SECONDS)} {_SAME_CALLS}")
        its = _read(_Call, told, process)
        if its.name != call:
            raise ArgumentError(
                f"Process {process} is at {its.name}, and process {this} at {call}. {_SAME_CALLS}"
            )
        found.append(its.given["text"])
    return tuple(found)


def _next_key(processes: tuple[int, ...]) -> str:
    """The key of their next comparison, the same in all of them."""
    _comparisons[processes] += 1
    return _key(processes, _comparisons[processes])


def _key(processes: tuple[int, ...], number: int) -> str:
    return f"crossshard/{crc32(repr(processes))}/{number}"


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The indices of the processes that have devices of a mesh, in ascending order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def _gathered(key: str, mine: _Call, processes: tuple[int, ...]) -> list[_Call | None]:
    """What each process told, in their order; ``None`` from the first that has not on."""
    found: list[_Call | None] = [mine]
    for process in processes[1:]:
        told = _jax.told_by_processes(f"{key}/{process}", _SECONDS)
        found.append(None if told is None else _read(_Call, told, process))
        if told is None:
            break
    return found


def _tell(key: str, what: _Call | Disagreement | None) -> None:
    _jax.tell_processes(key, json.dumps(None if what is None else dataclasses.asdict(what)))


def _read(kind: Any, text: str, process: int) -> Any:
    """What a process told; whoever reaches the coordinator can write there."""
    try:
        return typed(kind, json.loads(text if len(text) <= _LONGEST else ""))
    except (ValueError, RecursionError):
        raise DistributedError(
            f"What the coordinator holds for process {process} is not what crossshard wrote: "
            f"{text!r:.80}. Another job may use the same coordinator."
        ) from None


def _judge(told: list[_Call | None], processes: tuple[int, ...]) -> Disagreement | None:
    calls: list[_Call] = []
    for process, each in zip(processes, told, strict=False):
        if each is None:
            return Disagreement(_missing(process, calls[0].name, _SECONDS))
        calls.append(each)
        if each.name != calls[0].name:
            return Disagreement(
                f"Process {process} is at {each.name}, and process {processes[0]} at "
                f"{calls[0].name}."
            )
    for name in sorted({name for call in calls for name in call.given}):
        passed = [call.given.get(name, "nothing") for call in calls]
        if len(set(passed)) > 1:
            # The first of the most common ones, so that of two processes the second is odd.
            common = collections.Counter(passed).most_common(1)[0][0]
            odd = [p for p, each in zip(processes, passed, strict=True) if each != common]
            other = processes[passed.index(common)]
            of_odd = passed[processes.index(odd[0])]
            return Disagreement("", name, tuple(odd), of_odd, other, common)
    return None


def _missing(process: int, call: str, seconds: float) -> str:
    return f"Process {process} has not reached {call} in {seconds} seconds."


_SAME_CALLS = "Every process of a mesh must make the same calls, in the same order."
