"""Agreement: compares the arguments of all processes of a mesh, through their coordinator."""

import collections
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from crossshard import _jax
from crossshard.errors import ArgumentError

# A process may load its data, or compile, for minutes before it reaches the same line.
_SECONDS = 600

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
    processes = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    own = jax.process_index()
    if len(processes) == 1 or own not in processes or not _jax.has_coordinator():
        return
    _comparisons[processes] += 1
    key = f"crossshard/{_checksum(repr(processes).encode())}/{_comparisons[processes]}"
    if own == processes[0]:
        verdict = _verdict(key, call, given(), processes, mend)
        _jax.tell_processes(f"{key}/verdict", verdict)
    else:
        _jax.tell_processes(f"{key}/{own}", json.dumps([call, dict(given())]))
        told = _jax.told_by_processes(f"{key}/verdict", 2 * _SECONDS)
        verdict = _missing(processes[0], call, 2 * _SECONDS) if told is None else told
    if verdict:
        raise ArgumentError(verdict)


def exchange(call: str, text: str, mesh: Mesh) -> tuple[str, ...]:
    """What each process of the mesh passed, in the order of the processes; in every process.

    Raises:
      ArgumentError: a process has not reached this call, or is at another one.
    """
    processes = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    own = jax.process_index()
    if len(processes) == 1 or own not in processes or not _jax.has_coordinator():
        return (text,)
    _comparisons[processes] += 1
    key = f"crossshard/{_checksum(repr(processes).encode())}/{_comparisons[processes]}"
    _jax.tell_processes(f"{key}/{own}", json.dumps([call, text]))
    found = []
    for process in processes:
        told = _jax.told_by_processes(f"{key}/{process}", _SECONDS)
        if told is None:
            raise ArgumentError(_missing(process, call, _SECONDS))
        its_call, its_text = json.loads(told)
        if its_call != call:
            raise ArgumentError(
                f"Process {process} is at {its_call}, and process {own} at {call}. {_SAME_CALLS}"
            )
        found.append(str(its_text))
    return tuple(found)


def _verdict(
    key: str, call: str, given: Mapping[str, str], processes: tuple[int, ...], mend: str
) -> str:
    """The difference between the first process and another; empty without one."""
    first, *others = processes
    for process in others:
        told = _jax.told_by_processes(f"{key}/{process}", _SECONDS)
        if told is None:
            return _missing(process, call, _SECONDS)
        its_call, its_own = json.loads(told)
        if its_call != call:
            return (
                f"Process {process} is at {its_call}, and process {first} at {call}. {_SAME_CALLS}"
            )
        for name in sorted({*given, *its_own}):
            one, other = given.get(name, "nothing"), its_own.get(name, "nothing")
            if one != other:
                return (
                    f"To {call}, process {process} passed {name} {other}, and process {first} "
                    f"{one}. {mend}"
                )
    return ""


def _missing(process: int, call: str, seconds: float) -> str:
    return f"Process {process} has not reached {call} in {seconds} seconds. {_SAME_CALLS}"


_SAME_CALLS = "Every process of a mesh must make the same calls, in the same order."


def checksum(tree: Any) -> str:
    """``checksum 1a2b3c4d`` of the arrays of a pytree, or of types: paths, shapes, dtypes, values.

    >>> import jax.numpy as jnp
    >>> checksum({"w": jnp.ones(3)}) == checksum({"w": np.ones(3, np.float32)})
    True
    """
    found = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
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
