"""Trip counts of loops, from XLA's annotation or from the loop counter."""

import dataclasses
import math
import re

from crossshard.tools.inspection.hlo import Computation, Instruction, Module

_UNCHANGED = {"copy", "copy-start", "copy-done", "bitcast", "reshape"}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """The trip count of a ``while``, or ``None`` if unknown.

    XLA annotates it on CPUs and GPUs. On TPUs it is found from the counter: an element of the carry
    with a constant start, increment and limit.

    Args:
      module: the program.
      computation: the computation of the loop.
      loop: the instruction.
    """
    config = loop.attributes.get("backend_config", "")
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', config)
    return int(known[1]) if known else _counted(module, computation, loop)


def _counted(module: Module, computation: Computation, loop: Instruction) -> int | None:
    carry = _unchanged(computation, loop.operands[0])
    (condition,) = (module.computations[name] for name in loop.called("condition"))
    (body,) = (module.computations[name] for name in loop.called("body"))
    test, after = condition.root, body.root
    if carry.opcode != "tuple" or after.opcode != "tuple":
        return None
    if test.opcode != "compare" or test.attributes.get("direction") != "LT":
        return None
    counts = _Counts(computation, carry, body)
    counter = _element(condition, test.operands[0])
    if counter is None:
        return None
    start = _constant(computation, carry.operands[counter])
    limit = counts.value(condition, test.operands[1])
    step = counts.growth(counter)
    if start is None or limit is None or step is None or step < 1:
        return None
    return max(0, math.ceil((limit - start) / step))


@dataclasses.dataclass(frozen=True)
class _Counts:
    """The loop-invariant integers of a loop."""

    outside: Computation
    carry: Instruction
    body: Computation

    def value(self, inside: Computation, name: str) -> int | None:
        """The constant value of an instruction in the condition or body, if loop-invariant."""
        element = _element(inside, name)
        if element is None:
            return _constant(inside, name)
        if _element(self.body, self.body.root.operands[element]) != element:
            return None
        return _constant(self.outside, self.carry.operands[element])

    def growth(self, element: int) -> int | None:
        """What the body adds to an element of the carry."""
        after = _unchanged(self.body, self.body.root.operands[element])
        if after.opcode != "add":
            return None
        increments = [name for name in after.operands if _element(self.body, name) != element]
        return self.value(self.body, increments[0]) if len(increments) == 1 else None


def _unchanged(computation: Computation, name: str) -> Instruction:
    """The instruction that a value comes from, through copies."""
    found = computation.instructions[name]
    while found.opcode in _UNCHANGED:
        found = computation.instructions[found.operands[0]]
    return found


def _element(computation: Computation, name: str) -> int | None:
    """The index of a value in its computation's parameter, or ``None``."""
    found = _unchanged(computation, name)
    if found.opcode != "get-tuple-element":
        return None
    if computation.instructions[found.operands[0]].opcode != "parameter":
        return None
    return int(found.attributes["index"])


def _constant(computation: Computation, name: str) -> int | None:
    found = _unchanged(computation, name)
    is_int = found.opcode == "constant" and re.fullmatch(r"-?\d+", found.argument)
    return int(found.argument) if is_int else None
