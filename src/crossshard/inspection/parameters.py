"""How many bytes of parameters a step trains, and over how many shards, told from its program.

A program does not say which of its inputs are parameters, but what becomes of each: a gradient
depends on the parameters and is reduced, and each parameter has an output of its own shape, dtype
and layout that depends on that same reduction. Moments have such outputs too, but the reduction
does not depend on them.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.inspection.collectives import (
    Collective,
    is_scalar,
    operands_of,
    runs_of_collectives,
)
from crossshard.inspection.dependence import dependence
from crossshard.inspection.groups import groups_of
from crossshard.inspection.hlo import Array, Module, leaves

# A hand-written step may gather its moments as well, so feeding these tells nothing.
_COPYING = {"all-gather", "collective-broadcast"}


@dataclasses.dataclass(frozen=True)
class _Value:
    """An input or output; equal ones may be one parameter before and after the step."""

    array: Array
    replicated: bool


def parameter_bytes(parameters: Any) -> int:
    """The bytes of one whole copy of the parameters, as the caller names them.

    Args:
      parameters: a number of bytes, or a pytree of arrays or ``jax.ShapeDtypeStruct``. Leaves of
        one element are left aside, as their collectives are.

    Raises:
      ArgumentError: the number of bytes is negative.
      ArgumentTypeError: a leaf is no array.

    >>> parameter_bytes({"w": np.zeros((3, 4), np.float32), "scale": np.zeros((), np.float32)})
    48
    """
    if isinstance(parameters, int) and not isinstance(parameters, bool):
        if parameters < 0:
            raise ArgumentError(f"parameters must be a number of bytes; got {parameters}.")
        return parameters
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ArgumentTypeError(
                "parameters must be a pytree of arrays or of jax.ShapeDtypeStruct, or a number of "
                f"bytes; got {type(leaf).__name__} at {jax.tree_util.keystr(path) or 'its root'}."
            )
        size = int(np.prod(leaf.shape, dtype=np.int64))
        total += size * leaf.dtype.itemsize if size > 1 else 0
    return total


def infer_parameter_bytes(
    module: Module, inputs: Sequence[bool] | None, outputs: Sequence[bool] | None
) -> int | None:
    """The bytes of one whole copy of the parameters, as far as the program tells.

    Args:
      module: the program.
      inputs: per input, whether all devices hold the same of it; none if that is not known.
      outputs: the same of the outputs.

    Returns:
      The bytes, or none where no input can be told to be a parameter, as in a step that is given
      its gradients.
    """
    given = _with_layout([each.shape for each in module.entry.parameters], inputs)
    root = module.entry.root.shape
    results = _with_layout(root if isinstance(root, tuple) else [root], outputs)
    uses = _uses(module, len(given))
    trained: dict[_Value, dict[int, set[int]]] = defaultdict(dict)
    for number, value in enumerate(given):
        updated = {
            i
            for i, result in enumerate(results)
            if result == value and uses.outputs[i] & uses.reduced_by[number]
        }
        if updated and value.array.is_floating and not is_scalar(value.array):
            trained[value][number] = updated

    def shards(number: int) -> int:
        return 1 if given[number].replicated else uses.gathered.get(number, 1)

    def total(chosen: Container[int]) -> int:
        found = 0
        for value, updates in trained.items():
            taken = {number: each for number, each in updates.items() if number in chosen}
            parts = sorted((shards(number) for number in taken), reverse=True)
            # Two inputs that share one updated output cannot both be what is updated.
            outputs = set[int]().union(*taken.values())
            found += value.array.bytes * sum(parts[: len(outputs)])
        return found

    # A shard's own arrays are most often its batch, which may have the shape of a moment's shard.
    # Only where nothing is stored whole, or gathered, are they parameters, as under groups.
    whole = {i for i, value in enumerate(given) if value.replicated or i in uses.gathered}
    return total(whole) or total(range(len(given))) or None


@dataclasses.dataclass(frozen=True)
class _Uses:
    """What becomes of a program's inputs.

    Attributes:
      reduced_by: per input, the set of the reductions that depend on it.
      gathered: by input, over how many shards its parts are gathered before any reduction.
      outputs: per output, the set of what it depends on, reductions among it.
    """

    reduced_by: Sequence[int]
    gathered: Mapping[int, int]
    outputs: Sequence[int]


def _uses(module: Module, inputs: int) -> _Uses:
    runs = list(runs_of_collectives(module))
    depends = dependence(module, [run.instruction.name for run, _ in runs])
    reductions = sum(
        depends.members[run.instruction.name] for run, kind in runs if kind not in _COPYING
    )
    reduced_by = [0] * inputs
    gathered: dict[int, int] = {}
    for run, kind in runs:
        name = run.instruction.name
        for array, members in zip(operands_of(run, kind), depends.operands[name], strict=False):
            if is_scalar(array):
                continue
            for number in range(inputs):
                if not members >> number & 1:
                    continue
                if kind not in _COPYING:
                    reduced_by[number] |= depends.members[name]
                elif not members & reductions:
                    gathered[number] = max(map(len, groups_of(run.instruction, kind, module)))
    return _Uses(reduced_by, gathered, depends.outputs)


def _with_layout(shapes: Iterable[Any], replicated: Sequence[bool] | None) -> list[_Value]:
    arrays = [array for shape in shapes for array in leaves(shape)]
    if replicated is None or len(replicated) != len(arrays):
        replicated = [True] * len(arrays)
    return [_Value(array, same) for array, same in zip(arrays, replicated, strict=True)]


def _members(members: int, number: int) -> list[int]:
    return [i for i in range(number) if members >> i & 1]


def joined_shards(found: Sequence[Collective], devices: int) -> int:
    """Over how many shards the parameters are kept the same: those that collectives join.

    Groups over one axis of a mesh and then over another join the shards of both; groups that stay
    apart keep parameters of their own.
    """
    leader = list(range(devices))

    def lead(device: int) -> int:
        while leader[device] != device:
            device = leader[device]
        return device

    for each in found:
        if each.bytes_sent:
            for first, *others in each.groups:
                for other in others:
                    leader[lead(other)] = lead(first)
    sizes: dict[int, int] = defaultdict(int)
    for device in range(devices):
        sizes[lead(device)] += 1
    return max(sizes.values())
