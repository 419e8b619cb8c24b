"""The instructions that a program executes, and how often."""

import dataclasses
import math
import re
from collections.abc import Iterator

from crossshard.pipeline.stages.nonfinite import RARE
from crossshard.tools.inspection.hlo import Computation, Instruction, Module

# Attributes that name a called computation. to_apply also names reducers, which do not communicate.
_CALLS = ("calls", "to_apply")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_LOOP = ("condition", "body")

# What a counter of a loop may pass through.
_UNCHANGED = {"copy", "copy-start", "copy-done", "bitcast", "reshape"}


@dataclasses.dataclass(frozen=True)
class Execution:
    """One executed instruction.

    Attributes:
      instruction: the instruction.
      computation: its computation.
      caller: the instruction that calls this computation; ``None`` in the entry.
      around: the computation of the caller.
      in_loop: whether it is in a loop.
      branches: the conditionals around it, outermost first, each with the number of the branch.
      times: how often it runs in one call of the program; ``None`` if a loop's length is unknown.
      rare: whether it runs only in steps in which a gradient is not finite.
    """

    instruction: Instruction
    computation: Computation
    caller: Instruction | None = None
    around: Computation | None = None
    in_loop: bool = False
    branches: tuple[tuple[str, int], ...] = ()
    times: int | None = 1
    rare: bool = False


def executions(module: Module) -> Iterator[Execution]:
    """All instructions that can execute, in order, including all branches of a conditional."""
    yield from _through(module, Execution(module.entry.root, module.entry))


def _through(module: Module, at: Execution) -> Iterator[Execution]:
    for instruction in at.computation.instructions.values():
        run = dataclasses.replace(at, instruction=instruction)
        yield run
        # The end of an asynchronous computation repeats its name.
        if instruction.opcode.endswith(("-update", "-done")):
            continue
        scopes = (instruction.quoted("metadata", "op_name") or "").split("/")
        # The loop, or the conditional, itself: what runs in it names the scope too.
        rare = at.rare or (RARE in scopes and instruction.opcode in ("while", "conditional"))
        inner = dataclasses.replace(run, caller=instruction, around=at.computation, rare=rare)
        for computation in _called(module, instruction, _CALLS):
            yield from _through(module, dataclasses.replace(inner, computation=computation))
        for number, computation in enumerate(_called(module, instruction, _BRANCHES)):
            branches = (*at.branches, (instruction.name, number))
            branch = dataclasses.replace(inner, computation=computation, branches=branches)
            yield from _through(module, branch)
        if instruction.opcode == "while":
            trips = trip_count(module, at.computation, instruction)
            trips = 1 if rare and not at.rare else trips
            times = None if trips is None or at.times is None else at.times * trips
            # The rare one has one turn, or none.
            in_loop = at.in_loop or not rare or at.rare
            inner = dataclasses.replace(inner, in_loop=in_loop, times=times)
            for computation in _called(module, instruction, _LOOP):
                yield from _through(module, dataclasses.replace(inner, computation=computation))


def called_computations(module: Module, instruction: Instruction) -> list[Computation]:
    """The computations that an instruction runs, those of all branches and of loops included."""
    return _called(module, instruction, (*_CALLS, *_BRANCHES, *_LOOP))


def _called(
    module: Module, instruction: Instruction, attributes: tuple[str, ...]
) -> list[Computation]:
    names = [name for attribute in attributes for name in instruction.called(attribute)]
    return [module.computations[name] for name in names]


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
