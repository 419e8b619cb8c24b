"""The memory that the kernels of a compiled program read and write."""

from crossshard.tools.inspection.collectives import KINDS
from crossshard.tools.inspection.execution import called_computations, executions
from crossshard.tools.inspection.hlo import Computation, Instruction, Module, leaves
from crossshard.tools.inspection.overlap import FREE

_CONTROL = frozenset({"while", "conditional", "call", "async-start", "call-start"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


def bytes_moved(module: Module) -> int:
    """The bytes that the kernels of a program read and write on one device, in one call.

    What they do not touch of an array is left out, and so are collectives. A loop of unknown length
    counts once.
    """
    return sum(
        (run.times or 1) * _bytes(module, run.instruction, run.computation)
        for run in executions(module)
        if (run.caller is None or run.caller.opcode in _CONTROL)
        and run.instruction.opcode not in FREE | _CONTROL
        and not _is_communication(run.instruction.opcode)
    )


def _is_communication(opcode: str) -> bool:
    plain = opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    return plain in KINDS or opcode.endswith(("-done", "-update"))


def _bytes(module: Module, each: Instruction, computation: Computation) -> int:
    shapes = [computation.instructions[name].shape for name in each.operands]
    sizes = [sum(array.bytes for array in leaves(shape)) for shape in shapes]
    output = sum(array.bytes for array in leaves(each.shape))
    if each.opcode in _SLICES:
        return 2 * output
    if each.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if each.opcode == "fusion":
        for inner in called_computations(module, each):
            sizes = [
                _read(inner, parameter, size)
                for parameter, size in zip(inner.parameters, sizes, strict=True)
            ]
            if inner.root.opcode == "dynamic-update-slice":
                updated = inner.instructions[inner.root.operands[1]].shape
                output = sum(array.bytes for array in leaves(updated))
    return output + sum(dict(zip(each.operands, sizes, strict=True)).values())


def _read(computation: Computation, parameter: Instruction, size: int) -> int:
    """The bytes that a fused computation reads of a parameter: all, or slices."""
    users = [x for x in computation.instructions.values() if parameter.name in x.operands]
    sliced = [x for x in users if x.opcode in _SLICES]
    updated = [
        x
        for x in users
        if x.opcode == "dynamic-update-slice" and x.operands[0] == parameter.name and x.is_root
    ]
    if not users or len(sliced) + len(updated) < len(users):
        return size
    return min(size, sum(array.bytes for x in sliced for array in leaves(x.shape)))
