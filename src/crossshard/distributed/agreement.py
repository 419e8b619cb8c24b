"""Agreement: compares what the processes of a mesh pass and run, through their coordinator."""

import bisect
import collections
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
from jax.sharding import Mesh

from crossshard import _check, _jax
from crossshard._check import typed
from crossshard._hash import crc32
from crossshard.distributed.judge import SAME_ROWS
from crossshard.distributed.watch import PROGRESS, waiting
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributedError,
    ProgramMismatchError,
)

# How long to wait where nobody watches, since the script has called jax.distributed.initialize.
_UNWATCHED_SECONDS = 600.0
# How long to wait where the watch ends all processes before.
_FOR_EVER = 1e6
# How many characters of a process are read, and how many lines of a program are compared.
_LONGEST, _MOST_LINES = 1 << 24, 1 << 20
# What a program is told as, and the calls that a user passes functions to.
_PROGRAM, _OF_A_FUNCTION = "program", ("evaluate", "predict")

# The number of exchanges of each set of processes; the same in all of them.
_exchanges: collections.Counter[tuple[int, ...]] = collections.Counter()


def check_agreement(
    call: str,
    given: Callable[[], Mapping[str, str]],
    mesh: Mesh,
    mend: str,
    lower: Callable[[], jax.stages.Lowered] | None = None,
) -> None:
    """Raise, in every process of the mesh, unless all of them passed the same to a call.

    ``given`` returns a text for each argument, by name, and ``lower`` the program that the call is
    about to run, with what it closes over; they are not called if all devices of the mesh belong to
    one process. ``mend`` is a sentence that says what to write instead.

    Raises:
      ArgumentError: a process passed something else, or has not reached this call.
      ProgramMismatchError: it would run another program.
    """
    text = functools.cache(lambda: "" if lower is None else _jax.without_addresses(lower()))
    told = lambda: {**given()} | ({} if lower is None else _checksum_of(text()))
    found = compare(call, told, mesh)
    if found is not None and found.name == _PROGRAM:
        raise _mismatch(call, _first_line(call, text(), mesh) or found)
    if found is not None:
        raise found.refusal(call, mend)


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """How the processes of a mesh differ."""

    name: str  # what they do not agree on
    odd: tuple[int, ...]  # the processes that differ from most others, or from the first
    passed: str  # what the first of these passed
    other: int  # the first process that passed what most did
    expected: str  # what it passed

    def refusal(self, call: str, mend: str) -> ArgumentError:
        """Return the error that says so; ``mend`` is as for ``check_agreement``."""
        return ArgumentError(
            f"To {call}, process {self.odd[0]} passed {self.name} {self.passed}, and "
            f"process {self.other} {self.expected}. {mend}"
        )


def compare(call: str, given: Callable[[], Mapping[str, str]], mesh: Mesh) -> Disagreement | None:
    """Return the first disagreement, the same in every process; ``None`` if there is none.

    The first is that of the first argument in the order of ``given``.

    It takes and raises what ``check_agreement`` does.
    """
    processes = processes_of(mesh)
    if len(processes) == 1:
        return None
    texts = exchange(call, json.dumps(dict(given())), mesh)
    pairs = zip(processes, texts, strict=False)
    told = {process: _read(dict[str, str], text, process) for process, text in pairs}
    for name in dict.fromkeys(name for each in told.values() for name in each):
        passed = {process: each.get(name, "nothing") for process, each in told.items()}
        # The first of the most common ones, so that of two processes the second is odd.
        common = collections.Counter(passed.values()).most_common(1)[0][0]
        odd = tuple(process for process in passed if passed[process] != common)
        if odd:
            other = next(process for process in passed if process not in odd)
            return Disagreement(name, odd, passed[odd[0]], other, common)
    return None


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a process tells: the call that it makes, a text, and what earlier calls were given."""

    name: str
    text: str
    mark: str = ""


def exchange(call: str, text: str, mesh: Mesh, within: str = "") -> tuple[str, ...]:
    """Return, in every process of the mesh, the text that each of them passed, in their order.

    The first process waits until all have told theirs, and the others wait for its answer. Nothing
    is sent if all devices of the mesh belong to one process.

    Args:
      call: the name of the call that every process makes.
      text: what this process passes.
      mesh: the mesh.
      within: the name of a timeout that is longer than that of the call.

    Raises:
      ArgumentError: a process has not reached this call, or is at another one.
    """
    processes = processes_of(mesh)
    if len(processes) == 1 or jax.process_index() not in processes or not _jax.has_coordinator():
        return (text,)
    of_all = len(processes) == jax.process_count()
    seconds = _UNWATCHED_SECONDS
    if PROGRESS.seconds is not None:
        # Nobody watches the processes of a smaller mesh, which may compile.
        seconds = _FOR_EVER if of_all else max(PROGRESS.seconds(within or call), seconds)
    this, first = jax.process_index(), processes[0]
    _exchanges[processes] += 1
    number, folder = _exchanges[processes], f"crossshard/{crc32(repr(processes))}"
    here, late = f"{folder}/{number}", f"has not reached {call} in {seconds:g} seconds."
    # The watch compares only what all processes of the job enter.
    with waiting(call, within) if of_all else contextlib.nullcontext():
        mark = PROGRESS.now.mark_before() if of_all else ""
        own = json.dumps(dataclasses.asdict(_Call(call, text, mark)))
        _jax.kv_set(f"{here}/{this}", own)
        if this == first:
            came = lambda process: _jax.kv_get(f"{here}/{process}", seconds) is not None
            wrong = next((f"Process {each} {late}" for each in processes if not came(each)), "")
            _jax.kv_set(f"{here}/all", wrong)
            # A process that has come here has read everything of the exchange before.
            _jax.kv_delete(f"{folder}/{number - 1}")
        else:
            found = _jax.kv_get(f"{here}/all", 2 * seconds)
            wrong = f"Process {first} {late}" if found is None else found
    texts = {} if wrong else _jax.kv_get_dir(f"{here}/")
    told = [_read(_Call, texts.get(str(each), ""), each) for each in processes if texts]
    for process, its in zip(processes, told, strict=False):
        if its.name != told[0].name and not wrong:
            wrong = f"Process {process} is at {its.name}, and process {first} at {told[0].name}."
    if wrong:
        raise ArgumentError(
            f"{wrong} Every process of a mesh must make the same calls, in the same order."
        )
    for process, its in zip(processes, told, strict=True):
        if its.mark != told[0].mark:
            raise ArgumentError(
                f"Before {call}, process {process} was given something else than process {first} "
                f"in a step: other rows, or another state. {SAME_ROWS}, and the same state."
            )
    return tuple(each.text for each in told)


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the indices of the processes that have devices of a mesh, in ascending order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def _read(kind: Any, text: str, process: int) -> Any:
    """Read what a process told; anyone who reaches the coordinator can write there."""
    try:
        return typed(kind, json.loads(text if len(text) <= _LONGEST else ""))
    except (ValueError, RecursionError):
        raise DistributedError(
            f"What the coordinator holds for process {process} is not what crossshard wrote: "
            f"{text!r:.80}. Another job may use the same coordinator."
        ) from None


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
    if found is not None:
        raise _mismatch("step", found)


def _mismatch(call: str, found: Disagreement) -> ProgramMismatchError:
    odd = ", ".join(map(str, found.odd))
    which = f"process {odd} differs" if len(found.odd) == 1 else f"processes {odd} differ"
    return ProgramMismatchError(
        f"The processes would not run the same {call}: {which}. Its {found.name} is "
        f"{found.passed}; that of process {found.other} is {found.expected}. Every process "
        f"must build the same step, with the same optimizer, options and shapes"
        f"{', and pass the same function' * (call in _OF_A_FUNCTION)}; only the rows of the batch "
        f"are its own."
    )


def _difference(lowered: jax.stages.Lowered, mesh: Mesh) -> Disagreement | None:
    text = _jax.without_addresses(lowered)
    devices = [device.id for device in mesh.devices.flat]
    given = {
        "mesh": f"{dict(mesh.shape)} of devices {devices}",
        "JAX": f"{jax.__version__} with jaxlib {version('jaxlib')}",
    }
    found = compare("a first step", lambda: given | _checksum_of(text), mesh)
    if found is None and mesh.devices.flat[0].platform == "cpu":
        # In its first run gloo connects the processes, and gives up if one is half a minute late.
        lowered.compile()
        exchange("a compiled step", "", mesh, within="compile")
    if found is None or found.name != _PROGRAM:
        return found
    return _first_line("step", text, mesh) or found


def _checksum_of(text: str) -> dict[str, str]:
    return {_PROGRAM: f"checksum {crc32(text)} of {text.count(chr(10))} lines"}


def _first_line(call: str, text: str, mesh: Mesh) -> Disagreement | None:
    """Return the first line in which programs differ; every process calls it."""
    lines = text.splitlines()

    def differ(number: int) -> bool:
        first = {"sum": crc32("\n".join(lines[:number]))}
        return compare("the lines of a program", lambda: first, mesh) is not None

    number = bisect.bisect_left(range(_MOST_LINES), True, key=differ)
    line = f"`{lines[number - 1].strip():.200}`" if number <= len(lines) else "nothing"
    given = {f"line {number} of the lowered {call}": line}
    return compare("a line of a program", lambda: given, mesh)
