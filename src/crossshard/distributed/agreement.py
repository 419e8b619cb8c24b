"""Agreement: compares what the processes of a mesh do and run, through their coordinator."""

import collections
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard import _check, _jax
from crossshard._check import typed
from crossshard._hash import crc32
from crossshard.distributed.progress import PROGRESS, waiting
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
    ProgramMismatchError,
)

# Where nobody watches the processes, since the script has connected them by JAX's own call.
_UNWATCHED_SECONDS = 600.0
# Where the watch ends all of them before.
_FOR_EVER = 1e6
# Characters of what one process tells.
_LONGEST = 1 << 24
# Lines of a program that are compared, to find the first that differs.
_MOST = 500_000

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
    """How the processes of a mesh differ."""

    name: str  # what they do not agree on
    odd: tuple[int, ...]  # the processes that differ from most others, or from the first
    passed: str  # what the first of these passed
    other: int  # the first process that passed what most did
    expected: str  # what it passed


def compare(call: str, given: Callable[[], Mapping[str, str]], mesh: Mesh) -> Disagreement | None:
    """What the processes of a mesh do not agree on, the same in all of them; ``None`` without it.

    Takes and raises what ``check_agreement`` does.
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
    if PROGRESS.seconds is None:
        seconds = _UNWATCHED_SECONDS
    elif of_all:
        seconds = _FOR_EVER
    else:
        # Nobody watches the processes of a smaller mesh, which may compile.
        seconds = max(PROGRESS.seconds(within or call), _UNWATCHED_SECONDS)
    # The watch compares only what all processes of the job enter.
    with waiting(call, within) if of_all else contextlib.nullcontext():
        answer = _exchanged(_Call(call, text), processes, seconds)
    if answer.wrong:
        raise ArgumentError(
            f"{answer.wrong} Every process of a mesh must make the same calls, in the same order."
        )
    return tuple(answer.texts[which] for which in answer.whose)


def _exchanged(own: _Call, processes: tuple[int, ...], seconds: float) -> _Answer:
    """What the first process answers to all; it has waited for each of the others for so long."""
    this = jax.process_index()
    _exchanges[processes] += 1
    number, folder = _exchanges[processes], f"crossshard/{crc32(repr(processes))}"
    if this == processes[0]:
        answer = _gathered(f"{folder}/{number}", own, processes, seconds)
        _jax.tell_processes(f"{folder}/{number}/answer", json.dumps(dataclasses.asdict(answer)))
        # Who has come here has read everything of the exchange before.
        _jax.forget(f"{folder}/{number - 1}")
        return answer
    _jax.tell_processes(f"{folder}/{number}/{this}", json.dumps(dataclasses.asdict(own)))
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


def check_same_program(lowered: jax.stages.Lowered, mesh: Mesh) -> None:
    """Raise, in every process of a mesh, unless all of them have lowered the same program.

    Every process must call it. XLA does not compare programs: one that adds where another takes
    the maximum gives numbers that nobody asked for, and one with other shapes aborts, or waits for
    ever. ``make_train_step`` calls it before the first run of each program; call it for a step that
    you compile yourself. On CPUs it also compiles the program, which a call of the same function
    then need not, and waits until all of them have. Addresses of Python objects are left out, so
    that Python functions which a program calls, as ``jax.debug.print`` does, are not compared.

    Args:
      lowered: the program, ``jax.jit(step).lower(*args)``.
      mesh: the mesh that it runs on.

    Raises:
      ArgumentTypeError: it is no program, or no mesh.
      ProgramMismatchError: names the process that differs, and the first line that does; or the
        one that has not reached this call, or is at another one.

    >>> import jax.numpy as jnp
    >>> lowered = jax.jit(jnp.sin).lower(1.0)
    >>> check_same_program(lowered, jax.make_mesh((1,), ("data",)))
    """
    if not isinstance(lowered, jax.stages.Lowered):
        raise ArgumentTypeError(
            f"lowered must be a program, as jax.jit(step).lower(*args) returns it; got "
            f"{_check.described(lowered)}."
        )
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError(f"mesh must be a jax.sharding.Mesh; got {_check.described(mesh)}.")
    if len(processes_of(mesh)) == 1:
        return
    try:
        found = _difference(lowered, mesh)
    except ArgumentError as error:
        raise ProgramMismatchError(str(error)) from None
    if found is None:
        return
    odd = ", ".join(map(str, found.odd))
    which = f"process {odd} differs" if len(found.odd) == 1 else f"processes {odd} differ"
    raise ProgramMismatchError(
        f"The processes would not run the same step: {which}. Its {found.name} is "
        f"{found.passed}; that of process {found.other} is {found.expected}. Every process "
        f"must build the same step, with the same optimizer, options and shapes; only the rows of "
        f"the batch are its own."
    )


def _difference(lowered: jax.stages.Lowered, mesh: Mesh) -> Disagreement | None:
    text = _jax.without_addresses(lowered)
    devices = [device.id for device in mesh.devices.flat]
    given = {
        "mesh": f"{dict(mesh.shape)} of devices {devices}",
        "JAX": f"{jax.__version__} with jaxlib {version('jaxlib')}",
        "program": f"checksum {crc32(text)} of {text.count(chr(10))} lines",
    }
    found = compare("a first step", lambda: given, mesh)
    if found is None and mesh.devices.flat[0].platform == "cpu":
        # In its first run gloo connects the processes, and gives up if one is half a minute late.
        lowered.compile()
        exchange("a compiled step", "", mesh, within="compile")
    if found is not None and found.name == "program":
        found = _first_line(text.splitlines(), mesh) or found
    return found


def _first_line(lines: list[str], mesh: Mesh) -> Disagreement | None:
    """The first line that differs."""
    # Numbers of one length, since what is given is compared in the order of its names.
    sums = {f"{number:08}": crc32(line) for number, line in enumerate(lines[:_MOST], 1)}
    found = compare("the lines of a program", lambda: sums, mesh)
    if found is None:
        return None
    number = int(found.name)
    line = f"`{lines[number - 1].strip():.200}`" if number <= len(lines) else "nothing"
    given = {f"line {number} of the lowered step": line}
    return compare("a line of a program", lambda: given, mesh)
