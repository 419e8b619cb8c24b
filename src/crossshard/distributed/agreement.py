"""Agreement: compares what the processes of a mesh do, through their coordinator."""

import collections
import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from crossshard import _jax
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
    verdict = compare(call, given, mesh)
    if verdict is not None and verdict.name is None:
        raise ArgumentError(f"{verdict.what} {_SAME_CALLS}")
    if verdict is not None:
        raise ArgumentError(
            f"To {call}, process {verdict.odd[0]} passed {verdict.name} {verdict.passed}, and "
            f"process {verdict.other} {verdict.expected}. {mend}"
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
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


def compare(call: str, given: Callable[[], Mapping[str, str]], mesh: Mesh) -> Verdict | None:
    """What the processes of a mesh do not agree on, the same in all of them; ``None`` without it.

    Args:
      call: the name of the call that every process makes.
      given: returns a text for each of its arguments, by name; not called if there is one process.
      mesh: the mesh.
    """
    processes = processes_of(mesh)
    own = jax.process_index()
    if len(processes) == 1 or own not in processes or not _jax.has_coordinator():
        return None
    key = _next_key(processes)
    mine = [call, dict(given())]
    if own == processes[0]:
        verdict = _judge(_gathered(key, mine, processes), processes)
        _jax.tell_processes(f"{key}/verdict", _written(verdict))
        if verdict is None:
            # Who has come here has read everything of the comparison before.
            _jax.forget(_key(processes, _comparisons[processes] - 1))
        return verdict
    _jax.tell_processes(f"{key}/{own}", json.dumps(mine))
    answer = _jax.told_by_processes(f"{key}/verdict", 2 * _SECONDS)
    if answer is None:
        return Verdict(_missing(processes[0], call, 2 * _SECONDS))
    what, said = _read(answer, processes[0])
    if what:
        return Verdict(what)
    if not said:
        return None
    odd, other = tuple(map(int, said["odd"].split())), int(said["other"])
    return Verdict("", said["name"], odd, said["passed"], other, said["expected"])


def exchange(call: str, text: str, mesh: Mesh) -> tuple[str, ...]:
    """What each process of the mesh passed, in the order of the processes; in every process.

    Raises:
      ArgumentError: a process has not reached this call, or is at another one.
    """
    processes = processes_of(mesh)
    own = jax.process_index()
    if len(processes) == 1 or own not in processes or not _jax.has_coordinator():
        return (text,)
    key = _next_key(processes)
    _jax.tell_processes(f"{key}/{own}", json.dumps([call, {"text": text}]))
    found = []
    for process in processes:
        told = _jax.told_by_processes(f"{key}/{process}", _SECONDS)
        if told is None:
            raise ArgumentError(f"{_missing(process, call, _SECONDS)} {_SAME_CALLS}")
        its_call, given = _read(told, process)
        if its_call != call:
            raise ArgumentError(
                f"Process {process} is at {its_call}, and process {own} at {call}. {_SAME_CALLS}"
            )
        found.append(given["text"])
    return tuple(found)


def _next_key(processes: tuple[int, ...]) -> str:
    """The key of their next comparison, the same in all of them."""
    _comparisons[processes] += 1
    return _key(processes, _comparisons[processes])


def _key(processes: tuple[int, ...], number: int) -> str:
    return f"crossshard/{_checksum(repr(processes).encode())}/{number}"


def _written(verdict: Verdict | None) -> str:
    """A verdict in the form in which processes tell each other everything."""
    if verdict is None or verdict.name is None:
        return json.dumps(["" if verdict is None else verdict.what, {}])
    said = {
        "name": verdict.name,
        "odd": " ".join(map(str, verdict.odd)),
        "passed": verdict.passed,
        "other": str(verdict.other),
        "expected": verdict.expected,
    }
    return json.dumps(["", said])


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The indices of the processes that have devices of a mesh, in ascending order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def _gathered(key: str, own: Any, processes: tuple[int, ...]) -> list[Any]:
    """What each process told, in their order; ``None`` from the first that has not on."""
    found = [own]
    for process in processes[1:]:
        told = _jax.told_by_processes(f"{key}/{process}", _SECONDS)
        found.append(None if told is None else _read(told, process))
        if told is None:
            break
    return found


def _read(text: str, process: int) -> Any:
    """What a process told; whoever reaches the coordinator can write there."""
    try:
        found = json.loads(text) if len(text) <= _LONGEST else None
    except ValueError:
        found = None
    match found:
        case [str(), dict() as given] if all(isinstance(text, str) for text in given.values()):
            return found
    raise DistributedError(
        f"What the coordinator holds for process {process} is not what crossshard wrote: "
        f"{text!r:.80}. Another job may use the same coordinator."
    )


def _judge(found: list[Any], processes: tuple[int, ...]) -> Verdict | None:
    calls = [each[0] for each in found if each is not None]
    for process, each in zip(processes, found, strict=False):
        if each is None:
            return Verdict(_missing(process, calls[0], _SECONDS))
        if each[0] != calls[0]:
            return Verdict(
                f"Process {process} is at {each[0]}, and process {processes[0]} at {calls[0]}."
            )
    for name in sorted({name for _, given in found for name in given}):
        passed = [given.get(name, "nothing") for _, given in found]
        if len(set(passed)) > 1:
            # The first of the most common ones, so that of two processes the second is odd.
            common = collections.Counter(passed).most_common(1)[0][0]
            odd = [p for p, each in zip(processes, passed, strict=True) if each != common]
            other = processes[passed.index(common)]
            of_odd = passed[processes.index(odd[0])]
            return Verdict("", name, tuple(odd), of_odd, other, common)
    return None


def _missing(process: int, call: str, seconds: float) -> str:
    return f"Process {process} has not reached {call} in {seconds} seconds."


_SAME_CALLS = "Every process of a mesh must make the same calls, in the same order."


def checksum(tree: Any) -> str:
    """``checksum 1a2b3c4d`` of a pytree of arrays, numbers or types: paths, shapes, dtypes, values.

    >>> import jax.numpy as jnp
    >>> checksum({"w": jnp.ones(3)}) == checksum({"w": np.ones(3, np.float32)})
    True
    """
    found = 0
    for path, given in jax.tree_util.tree_leaves_with_path(tree):
        leaf: Any = given if hasattr(given, "dtype") else np.asarray(given)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        name = f"{jax.tree_util.keystr(path)} {dtype} {leaf.shape}"
        found = zlib.crc32(name.encode(), found)
        # Of an array that is split over processes each has another part.
        is_here = getattr(leaf, "is_fully_addressable", True) or leaf.is_fully_replicated
        if is_here and not isinstance(leaf, jax.ShapeDtypeStruct):
            found = zlib.crc32(_numbers(leaf).reshape(-1).view(np.uint8).data, found)
    return f"checksum {found:08x}"


def _numbers(x: Any) -> np.ndarray:
    """The values of an array that this process has in full, in JAX's dtype; the data of keys."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if not getattr(x, "is_fully_addressable", True):
        x = x.addressable_data(0)
    return np.ascontiguousarray(x, jax.dtypes.canonicalize_dtype(x.dtype))


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
