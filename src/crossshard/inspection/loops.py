"""How often a loop of a program runs: as XLA has noted it, or as its counter says."""

import dataclasses
import math
import re

from crossshard.inspection.hlo import Computation, Instruction, Module

_UNCHANGED = {"copy", "copy-start", "copy-done", "bitcast", "reshape"}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a ``while`` runs its body; none where the program does not tell.

    XLA notes it for CPUs and GPUs. For TPUs it does not, and there it is read from the counter: an
    element of the carry that starts at a constant, grows by one, and ends the loop at another.

    Args:
      module: the program.
      computation: where the loop stands.
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
    """The integers of a loop that are the same in all its rounds."""

    outside: Computation
    carry: Instruction
    body: Computation

    def value(self, inside: Computation, name: str) -> int | None:
        """Of a value in the condition or body, if it is the same in every round."""
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
        others = [name for name in after.operands if _element(self.body, name) != element]
        return self.value(self.body, others[0]) if len(others) == 1 else None


def _unchanged(computation: Computation, name: str) -> Instruction:
    """The instruction that a value comes from, through copies."""
    found = computation.instructions[name]
    while found.opcode in _UNCHANGED:
        found = computation.instructions[found.operands[0]]
    return found


def _element(computation: Computation, name: str) -> int | None:
    """Which element of its computation's parameter a value is."""
    found = _unchanged(computation, name)
    if found.opcode != "get-tuple-element":
        return None
    if computation.instructions[found.operands[0]].opcode != "parameter":
        return None
    return int(found.attributes["index"])


def _constant(computation: Computation, name: str) -> int | None:
    found = _unchanged(computation, name)
    whole = found.opcode == "constant" and re.fullmatch(r"-?\d+", found.argument)
    return int(found.argument) if whole else None
