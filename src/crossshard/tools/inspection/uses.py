"""How a program uses its inputs: the collectives that they feed, and the steps that update them."""

from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from crossshard.tools.inspection.collectives import bytes_sent, is_scalar, operand_shapes
from crossshard.tools.inspection.execution import Execution, executions
from crossshard.tools.inspection.hlo import Module, leaves, width
from crossshard.tools.inspection.hlo_dependence import Dependence, Source, union
from crossshard.tools.inspection.loops import trip_count
from crossshard.tools.inspection.replica_groups import Groups, groups_of

# These are not evidence, because a hand-written step may also gather its moments.
_COPYING = {"all-gather", "collective-broadcast"}


class Operand(NamedTuple):
    """An operand of a collective that is no scalar.

    Attributes:
      source: it, as a source.
      given: its dependence.
      groups: the groups of the collective.
      reduces: whether the collective is a reduction.
      bytes_sent: the bytes that one device sends of it in one call.
      width: the most bits of its elements.
    """

    source: Source
    given: int
    groups: Groups
    reduces: bool
    bytes_sent: float
    width: int


class Uses:
    """How a program uses its inputs, which are given by their numbers here.

    Attributes:
      depends: the dependences of the outputs and of the operands of collectives.
      operands: those operands.
      fed: for each input, the operands that depend on it.
      reduced: for each input, those of them that are reduced, as a set.
      gathers: for each input, the groups of the all-gathers that it reaches before a reduction.
    """

    def __init__(
        self,
        module: Module,
        runs: Sequence[tuple[Execution, str]],
        left_out: Collection[tuple[str, int]] = (),
    ) -> None:
        runs = [(run, kind) for run, kind in runs if not {*run.branches} & {*left_out}]
        reducing = {run.instruction.name for run, kind in runs if kind not in _COPYING}
        names = {run.instruction.name for run, _ in runs}
        self._module = module
        self.depends: Dependence = Dependence(module, names, reducing, left_out)
        self.operands: list[Operand] = [
            Operand(
                source,
                self.depends.given[source.any],
                groups,
                kind not in _COPYING,
                (1 if run.times is None else run.times)
                * bytes_sent(
                    kind, max(map(len, groups), default=1), sum(x.bytes for x in leaves(shape))
                ),
                max(width(each.dtype) for each in leaves(shape)),
            )
            for run, kind in runs
            for groups in [groups_of(run.instruction, kind, module)]
            for source, shape in zip(
                self.depends.operands[run.instruction.name],
                operand_shapes(run, kind),
                # A ragged all-to-all sends only its first operand.
                strict=False,
            )
            if not all(map(is_scalar, leaves(shape)))
        ]
        reduced = union_of(each.source.any for each in self.operands if each.reduces)
        self.fed: list[list[Operand]] = [
            [each for each in self.operands if each.given & source.any]
            for source in self.depends.inputs
        ]
        self.reduced: list[int] = [
            union_of(each.source.any for each in fed if each.reduces) for fed in self.fed
        ]
        self.gathers: list[list[Groups]] = [
            [each.groups for each in fed if not each.reduces and not each.given & reduced]
            for fed in self.fed
        ]

    def gathered(self, number: int) -> list[Operand]:
        """The operands of gathers that are elements of an input, as those of its rows in loops."""
        moved = self.depends.inputs[number].moved
        return [each for each in self.fed[number] if each.given & moved and not each.reduces]

    def arriving(self, outputs: Iterable[int]) -> list[Operand]:
        """The operands of reductions that arrive in some outputs directly, as gradients do."""
        reached = self.reached(outputs)
        return [each for each in self.operands if each.reduces and each.source.direct & reached]

    def reached(self, outputs: Iterable[int]) -> int:
        """All that some outputs depend on."""
        return union_of(union(self.depends.outputs[i]) for i in outputs)

    def in_a_row(self, number: int, outputs: Iterable[int]) -> int:
        """The number of unrolled steps.

        These are reductions that arrive in the new value, each of a gradient of the parameter that
        the previous one has updated.
        """
        arriving, source = self.reached(outputs), self.depends.inputs[number]
        rows: dict[int, int] = {}
        for each in self.operands:
            if each.source.direct & arriving and each.given & source.direct:
                before = (rows[bit] for bit in rows if bit & each.given)
                rows[each.source.any] = 1 + max(before, default=0)
        return max(rows.values(), default=1)

    def in_loops(self, number: int, outputs: Iterable[int]) -> int:
        """The number of updates of an input by loops that carry it, in one call."""
        reached, source = self.reached(outputs), self.depends.inputs[number]
        names = {
            name
            for bit, name in self.depends.loops.items()
            if bit & reached and self.depends.given[bit] & source.direct
        }
        if not names:
            return 1
        loops = [run for run in executions(self._module) if run.instruction.name in names]
        outer = {name for run in loops for name in run.loops}
        return sum(self._rounds(run) for run in loops if run.instruction.name not in outer)

    def _rounds(self, run: Execution) -> int:
        trips = trip_count(self._module, run.computation, run.instruction)
        return 1 if trips is None or run.times is None else run.times * trips


def union_of(members: Iterable[int]) -> int:
    """The union of some sets."""
    return reduce(or_, members, 0)
