"""The kernels of a compiled program with the memory that they read and write, and their work."""

import dataclasses
import functools
from collections.abc import Iterator

from crossshard.inspection.collectives import KINDS
from crossshard.inspection.execution import called_computations, executions
from crossshard.inspection.hlo import Computation, Instruction, Module, leaves

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier "
    "partition-id replica-id send recv reshape domain".split()
)
_CONTROL = frozenset({"while", "conditional", "call", "async-start", "call-start"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_PRODUCTS = frozenset({"dot", "convolution", "ragged-dot"})
_MOVES = _FREE | _SLICES | {"copy", "transpose", "broadcast", "concatenate", "iota", "pad"}
_TRANSCENDENTAL = frozenset(
    "exponential exponential-minus-one log log-plus-one logistic power tanh sine cosine tan erf "
    "cbrt atan2".split()
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a program, as one device runs it.

    Attributes:
      bytes: that it reads and writes, without what it does not touch of an array.
      operations: on elements, without products.
      transcendental: the operations among them such as exponentials.
      is_product: whether it holds a matrix product or a convolution.
      times: how often it runs in one call; a loop of unknown length counts once.
    """

    bytes: int
    operations: int
    transcendental: int
    is_product: bool
    times: int


def kernels(module: Module) -> Iterator[Kernel]:
    """The kernels of a program, without its collectives."""
    work = functools.cache(functools.partial(_work, module))
    for run in executions(module):
        each = run.instruction
        if run.caller is not None and run.caller.opcode not in _CONTROL:
            continue
        if each.opcode in _FREE | _CONTROL or _is_communication(each.opcode):
            continue
        operations, transcendental, is_product = 0, 0, each.opcode in _PRODUCTS
        if each.opcode == "fusion":
            for inner in called_computations(module, each):
                more, hard, product = work(inner.name)
                operations, transcendental = operations + more, transcendental + hard
                is_product |= product
        else:
            operations, transcendental = _operations(each, run.computation)
        size = _bytes(module, each, run.computation)
        yield Kernel(size, operations, transcendental, is_product, run.times or 1)


def _is_communication(opcode: str) -> bool:
    plain = opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    return plain in KINDS or opcode.endswith(("-done", "-update"))


def _work(module: Module, name: str) -> tuple[int, int, bool]:
    """The operations in a fused computation, and whether one is a product."""
    total, hard, product = 0, 0, False
    computation = module.computations[name]
    for each in computation.instructions.values():
        more, transcendental = _operations(each, computation)
        total, hard, product = (
            total + more,
            hard + transcendental,
            product | (each.opcode in _PRODUCTS),
        )
        if each.opcode == "fusion":
            for inner in called_computations(module, each):
                more, transcendental, has = _work(module, inner.name)
                total, hard, product = total + more, hard + transcendental, product | has
    return total, hard, product


def _operations(each: Instruction, computation: Computation) -> tuple[int, int]:
    if each.opcode in _MOVES | _PRODUCTS or each.opcode in ("fusion", "custom-call"):
        return 0, 0
    shape = each.shape
    if each.opcode.startswith("reduce") and each.operands:
        shape = computation.instructions[each.operands[0]].shape
    size = sum(array.size for array in leaves(shape))
    return size, size * (each.opcode in _TRANSCENDENTAL)


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
