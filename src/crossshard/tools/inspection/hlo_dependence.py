"""Dependence analysis of HLO: the inputs and collectives that each value depends on.

Sets are integer bit masks. Tuples are tracked per element, so that a gradient and a moment that
share a fusion or a loop stay separate. So do the arrays of a bucket: a concatenated array has one
set for each of its arrays, and each of its elements depends on one of these sets.

Each input has two bits: any dependence, and direct dependence, which passes no reduction. So has a
reduction: its second bit is for a result that arrives as an array, not as a scalar such as a norm,
and passes no other reduction. A collective has bits for each of its operands, since XLA combines
those of different parameters.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from operator import or_

from crossshard.tools.inspection.hlo import Array, Computation, Instruction, Module, Shape

_BY_PART = {"all-reduce", "all-reduce-start", "reduce-scatter", "all-gather"}

# Ops that forward their only operand.
_WHOLE = {"copy", "opt-barrier", "all-reduce-done"}

# Ops that move or convert the elements of their first operand. Arithmetic on two buckets is left
# out, because their sets could combine in too many ways.
_MOVING = _WHOLE | {
    *("all-gather", "bitcast", "broadcast", "convert", "dynamic-slice"),
    *("reshape", "reverse", "slice", "transpose"),
}

_DEVICE = {"partition-id", "replica-id"}

Sets = frozenset[int]

# The sets of one array, or of each element of a tuple.
Depends = Sets | tuple["Depends", ...]


@dataclasses.dataclass(frozen=True)
class Dependence:
    """The dependences of a program's outputs and of chosen instructions.

    Attributes:
      outputs: for each output, its sets.
      operands: for each chosen instruction, one set for each of its operands.
      inputs: for each input, its bit.
      directly: for each input, its bit for direct dependence.
      device: the bit of the device's id.
      members: for each chosen instruction, the bit of each of its operands.
      arriving: for each reduction, the bits for results that arrive as arrays.
      trained: for each trained element of a loop's carry, its bit for direct dependence, with the
        loop's name and the dependence of the element when the loop begins.
    """

    outputs: tuple[Sets, ...]
    operands: Mapping[str, tuple[int, ...]]
    inputs: tuple[int, ...]
    directly: tuple[int, ...]
    device: int
    members: Mapping[str, tuple[int, ...]]
    arriving: Mapping[str, tuple[int, ...]]
    trained: Mapping[int, tuple[str, int]]


def dependence(
    module: Module,
    chosen: Sequence[Instruction],
    reductions: Collection[str],
    left_out: Collection[tuple[str, int]] = (),
) -> Dependence:
    """Propagate dependence from inputs and chosen instructions to the outputs.

    Args:
      module: the program.
      chosen: the instructions.
      reductions: the names of those that end direct dependence.
      left_out: branches not to follow: names of conditionals with numbers.
    """
    parameters = module.entry.parameters
    follow = _Follow(module, left_out)
    inputs = tuple(follow.new_member() for _ in parameters)
    directly = tuple(follow.new_member() for _ in parameters)
    follow.device = follow.new_member()
    for each in chosen:
        follow.members[each.name] = tuple(follow.new_member() for _ in each.operands)
        if each.name in reductions:
            follow.arriving[each.name] = tuple(follow.new_member() for _ in each.operands)
    follow.directly = sum(directly) + sum(map(sum, follow.arriving.values()))
    given = [_spread(each.shape, inputs[i] | directly[i]) for i, each in enumerate(parameters)]
    outputs = follow.through(module.entry, given)
    return Dependence(
        tuple(_leaves(outputs)),
        {name: tuple(sets) for name, sets in follow.operands.items()},
        inputs,
        directly,
        follow.device,
        follow.members,
        follow.arriving,
        follow.trained,
    )


def union(depends: Depends) -> int:
    """The union of all sets of a value."""
    return reduce(or_, depends if isinstance(depends, frozenset) else map(union, depends), 0)


def _leaves(depends: Depends) -> list[Sets]:
    parts = (depends,) if isinstance(depends, frozenset) else depends
    return [part if isinstance(part, frozenset) else frozenset({union(part)}) for part in parts]


def _spread(shape: Shape, members: int) -> Depends:
    if isinstance(shape, tuple):
        return tuple(_spread(part, members) for part in shape)
    return frozenset({members})


def _join(one: Depends, other: Depends) -> Depends:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_join, one, other))
    return frozenset({union(one) | union(other)})


@dataclasses.dataclass(frozen=True)
class _Part:
    """An element of a loop's carry.

    Attributes:
      is_state: whether it depends on its value in the previous iteration.
      is_trained: whether it also does so through a reduction.
    """

    is_state: bool
    is_trained: bool


class _Follow:
    def __init__(self, module: Module, left_out: Collection[tuple[str, int]]):
        self.operands: dict[str, list[int]] = {}
        self.trained: dict[int, tuple[str, int]] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.arriving: dict[str, tuple[int, ...]] = {}
        self.directly = 0
        self.device = 0
        self._module = module
        self._left_out = left_out
        self._number = 0
        self._parts: dict[str, tuple[_Part, ...]] = {}
        self._trained_members: dict[tuple[str, int], int] = {}

    def new_member(self) -> int:
        self._number += 1
        return 1 << self._number - 1

    def through(self, computation: Computation, given: Sequence[Depends]) -> Depends:
        """The dependence of a computation's output, given that of its parameters."""
        known: dict[str, Depends] = {}
        for each in computation.instructions.values():
            if each.opcode == "parameter":
                known[each.name] = given[int(each.argument)]
            else:
                taken = [known[name] for name in each.operands]
                if each.name in self.members:
                    self._note(each, taken)
                known[each.name] = self._as_it_arrives(each.shape, self._of(each, taken))
        return known[computation.root.name]

    def _note(self, each: Instruction, taken: list[Depends]) -> None:
        sets = self.operands.setdefault(each.name, [0] * len(taken))
        for number, depends in enumerate(taken):
            sets[number] |= union(depends)

    def _as_it_arrives(self, shape: Shape, depends: Depends) -> Depends:
        """The dependence of a value; for a scalar, without reductions that arrive as arrays."""
        if not isinstance(shape, Array) or shape.size > 1:
            return depends
        return frozenset({union(depends) & ~self._all_arriving})

    @functools.cached_property
    def _all_arriving(self) -> int:
        return sum(map(sum, self.arriving.values()))

    def _of(self, each: Instruction, taken: list[Depends]) -> Depends:
        if each.opcode == "tuple":
            return tuple(taken)
        if each.opcode == "get-tuple-element" and isinstance(taken[0], tuple):
            return taken[0][int(each.attributes["index"])]
        if each.opcode.removesuffix("-start") in ("fusion", "call", "async"):
            (name,) = each.called("calls") or each.called("to_apply")
            inner = self.through(self._module.computations[name], taken)
            # The start of an asynchronous computation also outputs its operands and a context.
            return _spread(each.shape, union(inner)) if each.opcode.endswith("-start") else inner
        if each.opcode == "while":
            return self._of_loop(each, taken[0])
        if each.opcode == "conditional":
            return self._of_branches(each, taken)
        if each.opcode in _WHOLE and len(taken) == 1:
            return taken[0]
        if each.opcode in _DEVICE:
            return frozenset({self.device})
        # Combined collectives act on each operand separately; an all-to-all mixes them.
        if isinstance(each.shape, tuple) and each.opcode in _BY_PART:
            return tuple(
                frozenset({self._passed(each, union(part), slice(i, i + 1))})
                for i, part in enumerate(taken)
            )
        if each.opcode == "concatenate":
            return frozenset[int]().union(*_leaves(tuple(taken)))
        if each.opcode in _MOVING and isinstance(taken[0], frozenset):
            rest = union(tuple(taken[1:]))
            return frozenset(self._passed(each, one | rest) for one in taken[0])
        return _spread(each.shape, self._passed(each, union(tuple(taken))))

    def _passed(self, each: Instruction, taken: int, operands: slice = slice(None)) -> int:
        if each.name in self.arriving:
            taken &= ~self.directly
        for members in (self.members, self.arriving):
            taken |= sum(members.get(each.name, ())[operands])
        return taken

    def _of_loop(self, each: Instruction, carry: Depends) -> Depends:
        """The dependence of a loop's output; iterations that train are treated as steps.

        The earlier value of a state element adds nothing: the second step's moments depend on all
        that the first one's did, and its gradient depends on the moments only through the
        parameters. So each iteration gets such an element as it was at the beginning.
        """
        (body,) = (self._module.computations[name] for name in each.called("body"))
        (condition,) = (self._module.computations[name] for name in each.called("condition"))
        parts = self._parts_of(each, body)
        given = carry
        while True:
            self.through(condition, [given])
            after = self.through(body, [given])
            joined = _join(given, after)
            if isinstance(joined, tuple) and isinstance(carry, tuple):
                begins = zip(carry, joined, parts, strict=True)
                joined = tuple(old if part.is_state else new for old, new, part in begins)
            if joined == given:
                break
            given = joined
        results = _join(carry, after)
        if not isinstance(results, tuple) or not isinstance(carry, tuple):
            return results
        return tuple(
            frozenset({union(result) | self._trained(each, number, union(carry[number]))})
            if parts[number].is_trained
            else result
            for number, result in enumerate(results)
        )

    def _trained(self, loop: Instruction, number: int, begins: int) -> int:
        key = (loop.name, number)
        member = self._trained_members.get(key) or self.new_member()
        self._trained_members[key] = member
        self.directly |= member
        before = self.trained.get(member, (loop.name, 0))[1]
        self.trained[member] = (loop.name, before | begins)
        return member

    def _parts_of(self, loop: Instruction, body: Computation) -> tuple[_Part, ...]:
        """The kind of each element of the carry, from one iteration of the loop."""
        if loop.name in self._parts:
            return self._parts[loop.name]
        shapes = body.parameters[0].shape
        if not isinstance(shapes, tuple):
            return ()
        members = [self.new_member() for _ in shapes]
        noted, self.operands = self.operands, {}
        after = self.through(body, [tuple(map(_spread, shapes, members))])
        reducing = [
            (itself, given)
            for name, sets in self.operands.items()
            if name in self.arriving
            for itself, given in zip(self.members[name], sets, strict=True)
        ]
        self.operands = noted
        parts = [union(part) for part in after] if isinstance(after, tuple) else [0] * len(shapes)
        self._parts[loop.name] = tuple(
            _Part(
                is_state=bool(part & member),
                is_trained=any(part & itself and member & sets for itself, sets in reducing),
            )
            for member, part in zip(members, parts, strict=True)
        )
        return self._parts[loop.name]

    def _of_branches(self, each: Instruction, taken: list[Depends]) -> Depends:
        names = each.called("branch_computations") or (
            *each.called("true_computation"),
            *each.called("false_computation"),
        )
        computations = [self._module.computations[name] for name in names]
        pairs = list(zip(computations, taken[1:], strict=True))
        followed = [n for n in range(len(pairs)) if (each.name, n) not in self._left_out]
        branches = [
            self.through(computation, [given])
            for computation, given in (pairs[n] for n in followed or range(len(pairs)))
        ]
        return _join(_spread(each.shape, union(taken[0])), reduce(_join, branches))
