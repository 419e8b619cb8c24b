"""Which instructions a program runs, from its entry on, and how often: what loops do."""

import dataclasses
import re
from collections.abc import Iterator

from crossshard.inspection.hlo import Computation, Instruction, Module

# The attributes through which an instruction runs a computation; the reducer in to_apply is
# XLA's own, but call has its computation there.
_CALLS = ("calls", "to_apply", "branch_computations", "true_computation", "false_computation")
_LOOP = ("condition", "body")


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction as it is run.

    Attributes:
      instruction: what is run.
      computation: where it stands.
      caller: the instruction that runs this computation; none in the entry.
      in_loop: whether that happens within a loop.
      times: how often in one call of the program; none where a loop's length is not known.
    """

    instruction: Instruction
    computation: Computation
    caller: Instruction | None = None
    in_loop: bool = False
    times: int | None = 1


def executions(module: Module) -> Iterator[Execution]:
    """Every instruction that a program can run, in order; both branches of a conditional."""
    yield from _through(module, Execution(module.entry.root, module.entry))


def _through(module: Module, at: Execution) -> Iterator[Execution]:
    for instruction in at.computation.instructions.values():
        run = dataclasses.replace(at, instruction=instruction)
        yield run
        # The end of an asynchronous computation names it again.
        if instruction.opcode.endswith(("-update", "-done")):
            continue
        for name in _called(instruction, _CALLS):
            inner = dataclasses.replace(run, computation=module.computations[name])
            yield from _through(module, dataclasses.replace(inner, caller=instruction))
        for name in _called(instruction, _LOOP):
            trips = trip_count(instruction)
            yield from _through(
                module,
                Execution(
                    instruction,
                    module.computations[name],
                    caller=instruction,
                    in_loop=True,
                    times=None if trips is None or at.times is None else at.times * trips,
                ),
            )


def _called(instruction: Instruction, attributes: tuple[str, ...]) -> list[str]:
    return [name for attribute in attributes for name in instruction.called(attribute)]


def trip_count(loop: Instruction) -> int | None:
    """How often a ``while`` runs its body, where XLA has found out."""
    config = loop.attributes.get("backend_config", "")
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', config)
    return int(known[1]) if known else None
