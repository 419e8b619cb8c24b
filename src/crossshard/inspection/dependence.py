"""What the values of a program depend on: which of its inputs, which of its collectives.

A set is one number with a bit for each member. A tuple has a set for each of its parts, so that a
gradient and a moment that share a fusion or a loop are not taken for one. An input is two members:
itself, and itself as far as it is reached without passing a reduction.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import or_

from crossshard.inspection.hlo import Computation, Instruction, Module, Shape

_BY_PART = {"all-reduce", "all-reduce-start", "reduce-scatter", "all-gather"}

# What gives its only operand, all parts of it.
_WHOLE = {"copy", "opt-barrier", "all-reduce-done"}

# The set of one value, or of each part of a tuple.
Depends = int | tuple["Depends", ...]


@dataclasses.dataclass(frozen=True)
class Dependence:
    """What a program's outputs and chosen instructions depend on.

    Attributes:
      outputs: per output, the set of what it depends on.
      operands: per chosen instruction, such a set for each of its operands.
      inputs: per input, its member in these sets.
      directly: per input, its member in these sets where no reduction lies between.
      members: per chosen instruction, its member in these sets.
    """

    outputs: tuple[int, ...]
    operands: Mapping[str, tuple[int, ...]]
    inputs: tuple[int, ...]
    directly: tuple[int, ...]
    members: Mapping[str, int]


def dependence(module: Module, chosen: Sequence[str], reductions: Collection[str]) -> Dependence:
    """Follow a program's inputs, and the values of chosen instructions, to its outputs.

    Args:
      module: the program.
      chosen: the names of the instructions.
      reductions: those of them behind which an input is no longer reached directly.
    """
    parameters = module.entry.parameters
    number = len(parameters)
    inputs = tuple(1 << i for i in range(number))
    directly = tuple(1 << number + i for i in range(number))
    members = {name: 1 << 2 * number + i for i, name in enumerate(chosen)}
    follow = _Follow(module, members, frozenset(reductions), sum(directly))
    given = [_spread(each.shape, inputs[i] | directly[i]) for i, each in enumerate(parameters)]
    outputs = follow.through(module.entry, given)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    operands = {name: tuple(sets) for name, sets in follow.operands.items()}
    return Dependence(tuple(map(_all, parts)), operands, inputs, directly, members)


def _all(depends: Depends) -> int:
    return depends if isinstance(depends, int) else reduce(or_, map(_all, depends), 0)


def _spread(shape: Shape, members: int) -> Depends:
    return tuple(_spread(part, members) for part in shape) if isinstance(shape, tuple) else members


def _join(one: Depends, other: Depends) -> Depends:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_join, one, other))
    return _all(one) | _all(other)


class _Follow:
    def __init__(
        self, module: Module, members: Mapping[str, int], reductions: Collection[str], directly: int
    ):
        self.operands: dict[str, list[int]] = {}
        self._module = module
        self._members = members
        self._reductions = reductions
        self._directly = directly

    def through(self, computation: Computation, given: Sequence[Depends]) -> Depends:
        """What a computation gives depends on, given what its parameters depend on."""
        known: dict[str, Depends] = {}
        for each in computation.instructions.values():
            if each.opcode == "parameter":
                known[each.name] = given[int(each.argument)]
            else:
                taken = [known[name] for name in each.operands]
                if each.name in self._members:
                    self._note(each, taken)
                known[each.name] = self._of(each, taken)
        return known[computation.root.name]

    def _note(self, each: Instruction, taken: list[Depends]) -> None:
        sets = self.operands.setdefault(each.name, [0] * len(taken))
        for number, depends in enumerate(taken):
            sets[number] |= _all(depends)

    def _of(self, each: Instruction, taken: list[Depends]) -> Depends:
        if each.opcode == "tuple":
            return tuple(taken)
        if each.opcode == "get-tuple-element" and isinstance(taken[0], tuple):
            return taken[0][int(each.attributes["index"])]
        if each.opcode.removesuffix("-start") in ("fusion", "call", "async"):
            (name,) = each.called("calls") or each.called("to_apply")
            inner = self.through(self._module.computations[name], taken)
            # What starts such a computation gives its operands and a context beside its value.
            return _spread(each.shape, _all(inner)) if each.opcode.endswith("-start") else inner
        if each.opcode == "while":
            return self._of_loop(each, taken[0])
        if each.opcode == "conditional":
            return self._of_branches(each, taken)
        if each.opcode in _WHOLE and len(taken) == 1:
            return taken[0]
        # Collectives that XLA has combined work part by part; an all-to-all mixes its parts.
        if isinstance(each.shape, tuple) and each.opcode in _BY_PART:
            return tuple(self._passed(each, _all(part)) for part in taken)
        return _spread(each.shape, self._passed(each, reduce(or_, map(_all, taken), 0)))

    def _passed(self, each: Instruction, taken: int) -> int:
        if each.name in self._reductions:
            taken &= ~self._directly
        return taken | self._members.get(each.name, 0)

    def _of_loop(self, each: Instruction, carry: Depends) -> Depends:
        (body,) = each.called("body")
        (condition,) = each.called("condition")
        while True:
            self.through(self._module.computations[condition], [carry])
            after = _join(carry, self.through(self._module.computations[body], [carry]))
            if after == carry:
                return carry
            carry = after

    def _of_branches(self, each: Instruction, taken: list[Depends]) -> Depends:
        names = each.called("branch_computations") or (
            *each.called("true_computation"),
            *each.called("false_computation"),
        )
        computations = [self._module.computations[name] for name in names]
        branches = [
            self.through(computation, [given])
            for computation, given in zip(computations, taken[1:], strict=True)
        ]
        return _join(_spread(each.shape, _all(taken[0])), reduce(_join, branches))
