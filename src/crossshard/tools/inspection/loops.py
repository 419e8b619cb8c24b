"""Trip counts of loops, from XLA's annotation or from the loop counter."""

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
    counter = _element(condition, test.operands[0])
    if counter is None:
        return None

    def value(inside: Computation, name: str) -> int | None:
        """The value of an instruction in the condition or body, if it is constant."""
        element = _element(inside, name)
        if element is None:
            return _constant(inside, name)
        if _element(body, after.operands[element]) != element:
            return None
        return _constant(computation, carry.operands[element])

    added = _unchanged(body, after.operands[counter])
    steps = [name for name in added.operands if _element(body, name) != counter]
    if added.opcode != "add" or len(steps) != 1:
        return None
    start = _constant(computation, carry.operands[counter])
    limit, step = value(condition, test.operands[1]), value(body, steps[0])
    if start is None or limit is None or step is None or step < 1:
        return None
    return max(0, math.ceil((limit - start) / step))


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
