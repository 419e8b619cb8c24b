"""What a step trains, told from its program: how many bytes, and over how many shards.

A program does not say which of its inputs are parameters, but what becomes of each: a gradient
depends on the parameters and is reduced, and each parameter has an output of its own shape, dtype
and layout that depends on that same reduction, and directly on the parameter as well. Moments have
such outputs too, but the reduction does not depend on them. A frozen weight feeds the reduction,
but it reaches no output except through it.
"""

import dataclasses
import math
import numbers
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import jax

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.inspection.collectives import (
    is_scalar,
    operand_shapes,
    runs_of_collectives,
)
from crossshard.inspection.dependence import Dependence, dependence
from crossshard.inspection.groups import Groups, groups_of
from crossshard.inspection.hlo import Array, Module, Shape, leaves

# A hand-written step may gather its moments as well, so feeding these tells nothing.
_COPYING = {"all-gather", "collective-broadcast"}


def parameter_bytes(parameters: Any) -> int:
    """The bytes of one whole copy of the parameters, as the caller names them.

    Args:
      parameters: a number of bytes, or a pytree of arrays or ``jax.ShapeDtypeStruct``. Leaves of
        one element are left aside, as their collectives are.

    Raises:
      ArgumentError: there are no bytes.
      ArgumentTypeError: a leaf is no array.

    >>> import numpy as np
    >>> parameter_bytes({"w": np.zeros((3, 4), np.float32), "scale": np.zeros((), np.float32)})
    48
    """
    if isinstance(parameters, numbers.Integral) and not isinstance(parameters, bool):
        total = int(parameters)
    else:
        named = jax.tree_util.tree_leaves_with_path(parameters)
        total = sum(_bytes_of_leaf(jax.tree_util.keystr(path), leaf) for path, leaf in named)
    if total <= 0:
        raise ArgumentError(
            "parameters must be arrays, not all of one element, or their number of bytes; got "
            f"{str(parameters)[:80]}, which has {total} bytes to reduce."
        )
    return total


def _bytes_of_leaf(path: str, leaf: Any) -> int:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise ArgumentTypeError(
            "parameters must be a pytree of arrays or of jax.ShapeDtypeStruct, or a number of "
            f"bytes; got {type(leaf).__name__} at {path or 'its root'}."
        )
    size = math.prod(leaf.shape)
    return size * leaf.dtype.itemsize if size > 1 else 0


@dataclasses.dataclass(frozen=True)
class Trained:
    """The parameters of a step, as far as its program tells.

    Attributes:
      bytes: of one whole copy.
      dtypes: XLA's names of theirs, each once.
      shards: over how many devices they are kept the same.
    """

    bytes: int
    dtypes: tuple[str, ...]
    shards: int


def find_trained(
    module: Module, inputs: Sequence[int] | None, outputs: Sequence[bool] | None
) -> Trained | None:
    """The parameters, or none where no input can be told to be one.

    Args:
      module: the program.
      inputs: per input, into how many different parts it is cut over the devices; none if that is
        not known.
      outputs: per output, whether all devices hold the same of it; none likewise.
    """
    shapes = _arrays(each.shape for each in module.entry.parameters)
    results = _arrays([module.entry.root.shape])
    parts = inputs if inputs and len(inputs) == len(shapes) else [1] * len(shapes)
    same = outputs if outputs and len(outputs) == len(results) else [True] * len(results)
    given = [_Value(array, part == 1) for array, part in zip(shapes, parts, strict=True)]
    uses = _uses(module)
    updates = _updates(given, list(map(_Value, results, same)), uses)
    # A shard's own arrays are most often its batch, which may have the shape of a moment's shard.
    # Only where nothing is stored whole, or gathered, are they parameters, as under groups.
    chosen = [n for n in updates if given[n].replicated or uses.gathers[n]] or list(updates)
    if not chosen:
        return None
    devices = module.partitions * module.replicas
    copies: dict[_Value, list[int]] = defaultdict(list)
    outputs_of: dict[_Value, set[int]] = defaultdict(set)
    joining: list[Groups] = []
    for number in chosen:
        gathered = joined_devices(uses.gathers[number], devices)
        copies[given[number]].append(min(gathered, parts[number]))
        outputs_of[given[number]] |= updates[number]
        joining += uses.between(number, updates[number])
    return Trained(
        # Two inputs that share one updated output cannot both be what is updated.
        bytes=sum(
            value.array.bytes * sum(sorted(found, reverse=True)[: len(outputs_of[value])])
            for value, found in copies.items()
        ),
        dtypes=tuple(dict.fromkeys(value.array.dtype for value in copies)),
        shards=joined_devices(joining, devices),
    )


@dataclasses.dataclass(frozen=True)
class _Value:
    """An input or output; equal ones may be one parameter before and after the step."""

    array: Array
    replicated: bool


def _arrays(shapes: Iterable[Shape]) -> list[Array]:
    return [array for shape in shapes for array in leaves(shape)]


@dataclasses.dataclass(frozen=True)
class _Uses:
    """What becomes of a program's inputs.

    Attributes:
      depends: what the outputs depend on.
      groups: per collective, as a member of the sets, the groups that it joins.
      fed: per input, the collectives that depend on it.
      reduced: per input, those of them that reduce.
      gathers: per input, the groups of the gatherings that it reaches before any reduction.
    """

    depends: Dependence
    groups: Mapping[int, Groups]
    fed: Sequence[int]
    reduced: Sequence[int]
    gathers: Sequence[Sequence[Groups]]

    def reaches(self, number: int, output: int) -> bool:
        """Whether an output depends on an input otherwise than through a reduction."""
        return bool(self.depends.outputs[output] & self.depends.directly[number])

    def between(self, number: int, outputs: Iterable[int]) -> list[Groups]:
        """Of the collectives that lie on a way from an input to some outputs, the groups."""
        on_the_way = self.fed[number] & reduce(or_, (self.depends.outputs[i] for i in outputs), 0)
        return [groups for member, groups in self.groups.items() if member & on_the_way]


def _uses(module: Module) -> _Uses:
    runs = list(runs_of_collectives(module))
    names = [run.instruction.name for run, _ in runs]
    reducing = {run.instruction.name for run, kind in runs if kind not in _COPYING}
    depends = dependence(module, names, reducing)
    reductions = sum(depends.members[name] for name in reducing)
    fed = [0] * len(depends.inputs)
    gathers: list[list[Groups]] = [[] for _ in depends.inputs]
    groups: dict[int, Groups] = {}
    for run, kind in runs:
        itself = depends.members[run.instruction.name]
        groups[itself] = groups_of(run.instruction, kind, module)
        # Of a ragged exchange only the first operand is sent.
        sent = zip(operand_shapes(run, kind), depends.operands[run.instruction.name], strict=False)
        for members in (found for shape, found in sent if not all(map(is_scalar, leaves(shape)))):
            for number, member in enumerate(depends.inputs):
                if members & member:
                    fed[number] |= itself
                    if kind in _COPYING and not members & reductions:
                        gathers[number].append(groups[itself])
    return _Uses(depends, groups, fed, [each & reductions for each in fed], gathers)


def _updates(
    given: Sequence[_Value], results: Sequence[_Value], uses: _Uses
) -> dict[int, set[int]]:
    """Per input that may be a parameter, the outputs that may be its new value."""
    alike: dict[_Value, list[int]] = defaultdict(list)
    for number, value in enumerate(given):
        if value.array.is_inexact and not is_scalar(value.array):
            alike[value].append(number)
    updates: dict[int, set[int]] = {}
    for value, equals in alike.items():
        outputs = [i for i, result in enumerate(results) if result == value]
        reaching = {n: {i for i in outputs if uses.reaches(n, i)} for n in equals}
        # What no input of its kind reaches directly, such as the mean of the parameters themselves
        # or a copy in fewer bits, has no other former value than one that it was reduced from.
        taken = set[int]().union(*reaching.values())
        for number in equals:
            reduced = {i for i in outputs if uses.reduced[number] & uses.depends.outputs[i]}
            if found := reduced & reaching[number] or reduced - taken:
                updates[number] = found
    return updates


def joined_devices(joining: Iterable[Groups], devices: int) -> int:
    """How many devices collectives join: those that are linked by groups, at most.

    Groups over one axis of a mesh and then over another join the devices of both; groups that stay
    apart do not.
    """
    leader = list(range(devices))

    def lead(device: int) -> int:
        while leader[device] != device:
            device = leader[device]
        return device

    for groups in joining:
        for first, *others in groups:
            for other in others:
                leader[lead(other)] = lead(first)
    return max(Counter(map(lead, range(devices))).values())
