"""Dependence analysis of HLO: the inputs and collectives that each value depends on.

Sets of sources are integer bit masks. Tuples are tracked per element, so that a gradient and a
moment that share a fusion or a loop stay separate. So do the arrays of a bucket: a concatenated
array has one set for each of its arrays, and each of its elements depends on one of these sets.
"""

from collections.abc import Collection, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

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

# Further ops that compute nothing; what they move is not kept apart by part.
_MERGING = {
    *("all-gather-start", "all-gather-done", "async-done", "async-update", "bitcast-convert"),
    *("concatenate", "get-tuple-element", "pad"),
}

Sets = frozenset[int]

# The sets of one array, or of each element of a tuple.
Depends = Sets | tuple["Depends", ...]


class Source(NamedTuple):
    """What values depend on: an input, an operand of a collective, or what a loop carries.

    Attributes:
      any: its bit for any dependence.
      direct: its bit for dependence that passes no reduction, and no scalar such as a norm.
      moved: its bit for values that are its own elements, moved and converted.
    """

    any: int
    direct: int
    moved: int

    @property
    def bits(self) -> int:
        """All of them."""
        return self.any | self.direct | self.moved


class Dependence:
    """The dependences of a program's outputs and of the operands of its collectives.

    Args:
      module: the program.
      collectives: the names of its collectives.
      reductions: the names of those of them that end direct dependence.
      left_out: branches not to follow: names of conditionals with numbers.

    Attributes:
      outputs: for each output, its sets.
      inputs: each input, as a source.
      device: the device's id.
      operands: for each collective, each of its operands.
      loops: for each element of a loop's carry that an iteration trains, by its bit for direct
        dependence, the name of the loop. Results of the loop have this bit.
      given: for each operand, by its bit for any dependence, what it depends on itself; for each
        trained element, by the bit above, what it depends on when the loop begins.
    """

    def __init__(
        self,
        module: Module,
        collectives: Collection[str],
        reductions: Collection[str],
        left_out: Collection[tuple[str, int]] = (),
    ) -> None:
        self._module = module
        self._collectives = collectives
        self._reductions = reductions
        self._left_out = left_out
        self._number = 0
        # The bits of all sources for direct dependence, and for their own elements.
        self._direct = 0
        self._moved = 0
        self.inputs: list[Source] = [self._source() for _ in module.entry.parameters]
        self.device: Source = self._source()
        self.operands: dict[str, list[Source]] = {}
        self.loops: dict[int, str] = {}
        self.given: dict[int, int] = {}
        given = [
            _spread(each.shape, source.bits)
            for each, source in zip(module.entry.parameters, self.inputs, strict=True)
        ]
        self.outputs: list[Sets] = _leaves(self._through(module.entry, given))

    def _source(self) -> Source:
        source = Source(*(each << self._number for each in (1, 2, 4)))
        self._number += 3
        self._direct |= source.direct
        self._moved |= source.moved
        return source

    def _through(self, computation: Computation, given: Sequence[Depends]) -> Depends:
        """The dependence of a computation's output, given that of its parameters."""
        known: dict[str, Depends] = {}
        for each in computation.instructions.values():
            if each.opcode == "parameter":
                known[each.name] = given[int(each.argument)]
                continue
            taken = [known[name] for name in each.operands]
            if each.name in self._collectives:
                self._note(each, taken)
            found = self._of(each, taken)
            if isinstance(each.shape, Array) and each.shape.size <= 1:
                found = frozenset({union(found) & ~(self._direct | self._moved)})
            known[each.name] = found
        return known[computation.root.name]

    def _note(self, each: Instruction, taken: list[Depends]) -> None:
        if each.name not in self.operands:
            self.operands[each.name] = [self._source() for _ in taken]
        for source, depends in zip(self.operands[each.name], taken, strict=True):
            self.given[source.any] = self.given.get(source.any, 0) | union(depends)

    def _of(self, each: Instruction, taken: list[Depends]) -> Depends:
        if each.opcode == "tuple":
            return tuple(taken)
        if each.opcode == "get-tuple-element" and isinstance(taken[0], tuple):
            return taken[0][int(each.attributes["index"])]
        if each.opcode.removesuffix("-start") in ("fusion", "call", "async"):
            (name,) = each.called("calls") or each.called("to_apply")
            inner = self._through(self._module.computations[name], taken)
            # The start of an asynchronous computation also outputs its operands and a context.
            return _spread(each.shape, union(inner)) if each.opcode.endswith("-start") else inner
        if each.opcode == "while":
            return self._of_loop(each, taken[0])
        if each.opcode == "conditional":
            return self._of_branches(each, taken)
        if each.opcode in _WHOLE and len(taken) == 1:
            return taken[0]
        if each.opcode in ("partition-id", "replica-id"):
            return frozenset({self.device.any})
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
        passed = self._passed(each, union(tuple(taken)))
        kept = passed if each.opcode in _MERGING else passed & ~self._moved
        return _spread(each.shape, kept)

    def _passed(self, each: Instruction, taken: int, operands: slice = slice(None)) -> int:
        """What a result depends on, if some operands depend on ``taken``."""
        is_reduction = each.name in self._reductions
        if is_reduction:
            taken &= ~(self._direct | self._moved)
        for source in self.operands.get(each.name, [])[operands]:
            taken |= source.any | source.direct * is_reduction
        return taken

    def _of_loop(self, loop: Instruction, carry: Depends) -> Depends:
        """The dependence of a loop's output, from one pass through its body.

        In this pass each element of the carry is a source, and is afterwards replaced by what it
        depends on when the loop begins. Its later values add nothing: the second step's moments
        depend on all that the first one's did, and its gradient depends on the moments only through
        the parameters. So iterations that train count as one step.
        """
        (body,) = (self._module.computations[name] for name in loop.called("body"))
        (condition,) = (self._module.computations[name] for name in loop.called("condition"))
        shape = body.parameters[0].shape
        is_tuple = isinstance(shape, tuple)
        shapes = shape if isinstance(shape, tuple) else (shape,)
        sources = [self._source() for _ in shapes]
        elements = tuple(_spread(s, x.bits) for s, x in zip(shapes, sources, strict=True))
        given = elements if is_tuple else elements[0]
        self._through(condition, [given])
        after = _unions(self._through(body, [given]), len(shapes))
        begins = _unions(carry, len(shapes))
        trained = [self._is_trained(x, new) for x, new in zip(sources, after, strict=True)]
        for bit, members in self.given.items():
            self.given[bit] = self._replaced(members, sources, begins)
        results: list[Depends] = []
        for source, old, new, is_trained in zip(sources, begins, after, trained, strict=True):
            now = self._replaced(new, sources, begins)
            # What is computed in some iteration is not only moved.
            members = (old | now) & ~self._moved | old & now & self._moved
            if is_trained:
                self.loops[source.direct] = loop.name
                self.given[source.direct] = old
                members |= source.direct
            results.append(frozenset({members}))
        return tuple(results) if is_tuple else results[0]

    def _is_trained(self, element: Source, after: int) -> bool:
        """Whether a reduction of an element of a carry arrives in its value after an iteration."""
        return any(
            after & source.any and self.given.get(source.any, 0) & element.any
            for name in self._reductions
            for source in self.operands.get(name, [])
        )

    def _replaced(self, members: int, sources: Sequence[Source], begins: Sequence[int]) -> int:
        """A set in which elements of a carry are replaced by what they depend on."""
        for source, old in zip(sources, begins, strict=True):
            begun = old & self._moved if members & source.moved else 0
            if members & source.direct:
                begun |= old & ~self._moved
            elif members & source.any:
                begun |= old & ~(self._direct | self._moved)
            members = members & ~source.bits | begun
        return members

    def _of_branches(self, each: Instruction, taken: list[Depends]) -> Depends:
        names = each.called("branch_computations") or (
            *each.called("true_computation"),
            *each.called("false_computation"),
        )
        pairs = list(zip(names, taken[1:], strict=True))
        followed = [p for n, p in enumerate(pairs) if (each.name, n) not in self._left_out]
        found = [
            self._through(self._module.computations[name], [given])
            for name, given in followed or pairs
        ]
        return reduce(_join, found, _spread(each.shape, union(taken[0])))


def union(depends: Depends) -> int:
    """The union of all sets of a value."""
    return reduce(or_, depends if isinstance(depends, frozenset) else map(union, depends), 0)


def _leaves(depends: Depends) -> list[Sets]:
    parts = (depends,) if isinstance(depends, frozenset) else depends
    return [part if isinstance(part, frozenset) else frozenset({union(part)}) for part in parts]


def _unions(depends: Depends, number: int) -> list[int]:
    """The union of the sets of each of so many elements."""
    parts = depends if isinstance(depends, tuple) else (depends,) * number
    return [union(part) for part in parts]


def _spread(shape: Shape, members: int) -> Depends:
    if isinstance(shape, tuple):
        return tuple(_spread(part, members) for part in shape)
    return frozenset({members})


def _join(one: Depends, other: Depends) -> Depends:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_join, one, other))
    return frozenset({union(one) | union(other)})
