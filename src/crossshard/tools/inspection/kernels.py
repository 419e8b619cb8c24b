"""The bytes that the kernels of a program read and write, besides those of matrix products.

A step that is not limited by its products is limited by these bytes and the memory's bandwidth.
"""

import functools
from collections.abc import Iterator

from crossshard.tools.inspection.collectives import (
    BRANCHES,
    CALLS,
    KERNEL,
    Overlaps,
    called_computations,
    is_rare,
    trip_count,
)
from crossshard.tools.inspection.hlo import Computation, Instruction, Module, leaves

# What is computed where it is used, without a kernel of its own.
_VIEWS = {"bitcast", "get-tuple-element"}


def kernel_bytes(module: Module) -> int:
    """Return the bytes that all kernels but matrix products read and write in one call.

    A fusion reads each of its operands once and writes its results once; of an array of which it
    takes or updates a slice, only the slice counts. Of a conditional the branch that moves most
    counts, a loop of unknown length counts once, and what runs only in few steps, where a gradient
    is not finite or copies are compared, does not. Caches are not modelled, so this is what the
    program asks of the memory at most.

    >>> from crossshard.tools.inspection.hlo import parse
    >>> kernel_bytes(parse('''HloModule tiny, num_partitions=1
    ...
    ... ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %twice = f32[4]{0} add(%p, %p)
    ... }'''))
    48
    """
    kind_of = Overlaps(module).work

    @functools.cache
    def of(name: str) -> int:
        computation = module.computations[name]
        return sum(of_one(computation, each) for each in computation.instructions.values())

    def of_one(computation: Computation, each: Instruction) -> int:
        if each.opcode.endswith(("-update", "-done")):
            return 0
        if each.opcode == "while":
            known = trip_count(module, computation, each)
            turns = 0 if is_rare(each) else 1 if known is None else known
            return turns * sum(of(name) for name in each.called("body"))
        if each.opcode == "conditional":
            branches = called_computations(module, each, BRANCHES)
            return 0 if is_rare(each) else max(of(branch.name) for branch in branches)
        if each.opcode in ("call", "async-start", "call-start"):
            return sum(of(inner.name) for inner in called_computations(module, each, CALLS))
        if kind_of(each) != KERNEL:
            return 0
        if each.opcode == "fusion":
            (fused,) = called_computations(module, each, CALLS)
            return _of_fusion(fused)
        return _of_alone(computation, each)

    return of(module.entry.name)


def _of_fusion(fused: Computation) -> int:
    values = fused.instructions
    users: dict[str, list[Instruction]] = {name: [] for name in values}
    for each in values.values():
        for name in each.operands:
            users[name].append(each)

    def read(name: str) -> int:
        """Return the number of elements that are read of an array."""
        whole = _elements(values[name])
        parts = 0
        for user in users[name]:
            if user.opcode in _VIEWS or user.opcode == "convert":
                parts += read(user.name)
            elif user.operands[0] == name and user.opcode in ("dynamic-slice", "slice", "gather"):
                parts += _elements(user)
            elif user.operands[0] != name or user.opcode != "dynamic-update-slice":
                return whole
        return min(parts, whole)

    def written(each: Instruction) -> Iterator[int]:
        if each.opcode == "tuple" or each.opcode in _VIEWS:
            for name in each.operands:
                yield from written(values[name])
        elif each.opcode == "dynamic-update-slice":
            yield _bytes(values[each.operands[1]])
        elif each.opcode != "parameter":
            yield _bytes(each)

    operands = [each for each in values.values() if each.opcode == "parameter"]
    # All of a tuple, or the elements that are read of an array.
    share = lambda each: read(each.name) / max(_elements(each), 1)
    return sum(int(_bytes(each) * share(each)) for each in operands) + sum(written(fused.root))


def _of_alone(computation: Computation, each: Instruction) -> int:
    """Return the bytes of a kernel that is one instruction."""
    if each.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * _bytes(each)
    if each.opcode == "dynamic-update-slice":
        return 2 * _bytes(computation.instructions[each.operands[1]])
    return _bytes(each) + sum(_bytes(computation.instructions[name]) for name in each.operands)


def _elements(each: Instruction) -> int:
    return sum(array.size for array in leaves(each.shape))


def _bytes(each: Instruction) -> int:
    return sum(array.bytes for array in leaves(each.shape))
