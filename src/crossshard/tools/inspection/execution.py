"""The instructions that a program executes, and how often."""

import dataclasses
from collections.abc import Iterator

from crossshard.pipeline.stages.nonfinite import RARE
from crossshard.tools.inspection.hlo import Computation, Instruction, Module
from crossshard.tools.inspection.loops import trip_count

# Attributes that name a called computation. to_apply also names reducers, which do not communicate.
_CALLS = ("calls", "to_apply")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_LOOP = ("condition", "body")


@dataclasses.dataclass(frozen=True)
class Execution:
    """One executed instruction.

    Attributes:
      instruction: the instruction.
      computation: its computation.
      caller: the instruction that calls this computation; ``None`` in the entry.
      around: the computation of the caller.
      loops: the names of the loops around it, outermost first.
      branches: the conditionals around it, outermost first, each with the number of the branch.
      times: how often it runs in one call of the program; ``None`` if a loop's length is unknown.
      rare: whether it runs only in steps in which a gradient is not finite.
    """

    instruction: Instruction
    computation: Computation
    caller: Instruction | None = None
    around: Computation | None = None
    loops: tuple[str, ...] = ()
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
            loops = at.loops if rare and not at.rare else (*at.loops, instruction.name)
            inner = dataclasses.replace(inner, loops=loops, times=times)
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
