"""Finds the parameters of a step in its program: their bytes, shards and updates.

HLO does not mark parameters, but their use does: a gradient depends on the parameters and is
reduced, and each parameter has an output of the same shape, dtype and layout that depends on that
reduction and directly on the parameter. Moments have such outputs too, but the reduction does not
depend on them. A frozen weight feeds the reduction, but reaches outputs only through it or
unchanged.

Nor does HLO mark the shards of the data, but the inputs show them: devices with the same data and
different pieces of the layers are one shard.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from crossshard.tools.inspection.collectives import is_scalar, operand_shapes, runs_of_collectives
from crossshard.tools.inspection.execution import Execution, executions
from crossshard.tools.inspection.hlo import Array, Module, Shape, leaves
from crossshard.tools.inspection.hlo_dependence import Dependence, Sets, dependence, union
from crossshard.tools.inspection.loops import trip_count
from crossshard.tools.inspection.parameters import Parameters
from crossshard.tools.inspection.pieces import Pieces, is_whole
from crossshard.tools.inspection.replica_groups import Groups, groups_of
from crossshard.tools.inspection.replicas import joined_devices, shards

# These are not evidence, because a hand-written step may also gather its moments.
_COPYING = {"all-gather", "collective-broadcast"}


class Trained(NamedTuple):
    """The parameters that a program trains.

    Attributes:
      parameters: by dtype and shards, most bytes first; empty if none is found.
      data: for each device its pieces of the batch that the largest is trained on; empty if none
        is found.
    """

    parameters: tuple[Parameters, ...]
    data: Sequence[object]


def find_trained(
    module: Module, inputs: Sequence[Pieces] | None, outputs: Sequence[bool] | None
) -> Trained:
    """The parameters, and the data of each device.

    Args:
      module: the program.
      inputs: for each input, the piece that each device holds; ``None`` if unknown.
      outputs: for each output, whether it is replicated; ``None`` if unknown.
    """
    devices = module.partitions * module.replicas
    shapes = _arrays(each.shape for each in module.entry.parameters)
    results = _arrays([module.entry.root.shape])
    known = inputs and len(inputs) == len(shapes) and {*map(len, inputs)} == {devices}
    layouts = inputs if inputs and known else [(0,) * devices] * len(shapes)
    same = outputs if outputs and len(outputs) == len(results) else [True] * len(results)
    given = [_Value(array, is_whole(layout)) for array, layout in zip(shapes, layouts, strict=True)]
    # Unlike a state, a batch is not returned.
    batches = {n for n, value in enumerate(given) if value.array not in results}
    runs = list(runs_of_collectives(module))
    uses = _uses(module, runs)
    if left_out := _without_data(runs, uses, batches):
        uses = _uses(module, runs, left_out)
    updates = _updates(given, list(map(_Value, results, same)), uses)
    shards_of = _Shards(layouts, uses, updates, batches)
    kept = {n: found for n in updates if (found := shards_of(n)) > 1}
    if not kept:
        # As with groups, where each device stores its own parameters, like its batch.
        kept = {n: found for n in updates if (found := shards_of(n, stored_apart=True)) > 1}
    copies: dict[_Value, list[tuple[int, int, int]]] = defaultdict(list)
    outputs_of: dict[_Value, set[int]] = defaultdict(set)
    for number, count in kept.items():
        pieces = len(set(layouts[number]))
        gathered = joined_devices(uses.gathers[number], devices)
        often = _in_loops(module, uses.depends, number, updates[number])
        often *= uses.in_a_row(number, updates[number])
        copies[given[number]].append((min(gathered, pieces), count, often))
        outputs_of[given[number]] |= updates[number]
    bytes_of: Counter[tuple[str, int, int]] = Counter()
    for value, inputs_alike in copies.items():
        # Two inputs cannot both be updated to one output.
        distinct = sorted(inputs_alike, reverse=True)[: len(outputs_of[value])]
        for gathered, count, often in distinct:
            bytes_of[value.array.dtype, count, often] += gathered * value.array.bytes
    largest = max(kept, key=lambda number: given[number].array.bytes, default=None)
    return Trained(
        tuple(
            Parameters(dtype, total, count, often)
            for (dtype, count, often), total in bytes_of.most_common()
        ),
        () if largest is None else shards_of.batch_of(largest),
    )


@dataclasses.dataclass(frozen=True)
class _Value:
    """The type of an input or output, which a parameter keeps in a step."""

    array: Array
    replicated: bool


def _arrays(shapes: Iterable[Shape]) -> list[Array]:
    return [array for shape in shapes for array in leaves(shape)]


@dataclasses.dataclass(frozen=True)
class _Uses:
    """How a program uses its inputs.

    Attributes:
      depends: the dependences of the outputs.
      groups: for each operand of a collective, by its bit in the sets, the groups of the
        collective; equal ones are one object. Scalars are left out, here and below.
      fed: for each input, the operands that depend on it.
      reduced: for each input, those of them that are reduced.
      gathers: for each input, the groups of the all-gathers that it reaches before a reduction.
      given: for each operand, its dependence.
    """

    depends: Dependence
    groups: Mapping[int, Groups]
    fed: Sequence[int]
    reduced: Sequence[int]
    gathers: Sequence[Sequence[Groups]]
    given: Mapping[int, int]

    def on_the_way(self, number: int, outputs: Iterable[int]) -> int:
        """The operands of collectives between an input and some outputs."""
        return self.fed[number] & self._all(outputs)

    def arriving(self, outputs: Iterable[int]) -> int:
        """The operands of reductions that arrive as arrays in some outputs."""
        arrived = self._all(outputs)
        return sum(
            itself
            for name, members in self.depends.arriving.items()
            for itself, member in zip(self.depends.members[name], members, strict=True)
            if arrived & member
        )

    def in_a_row(self, number: int, outputs: Iterable[int]) -> int:
        """The number of unrolled steps.

        These are reductions that arrive in the new value, each of a gradient of the parameter that
        the previous one has updated.
        """
        arriving = self.arriving(outputs)
        rows: dict[int, int] = {}
        for member, given in self.given.items():
            if member & arriving and given & self.depends.directly[number]:
                rows[member] = 1 + max((rows[each] for each in rows if each & given), default=0)
        return max(rows.values(), default=1)

    def _all(self, outputs: Iterable[int]) -> int:
        return reduce(or_, (union(self.depends.outputs[i]) for i in outputs), 0)


def _without_data(
    runs: Sequence[tuple[Execution, str]], uses: _Uses, batches: Iterable[int]
) -> frozenset[tuple[str, int]]:
    """The branches of conditionals that send nothing of a batch, if all gradients are elsewhere.

    Such a branch is no step: copies of the parameters, and of all else, are made equal in it.
    """
    data = reduce(or_, (uses.depends.inputs[n] for n in batches), 0)
    sent: dict[tuple[str, int], bool] = defaultdict(bool)
    elsewhere = False
    for run, _ in runs:
        of_data = any(
            uses.given.get(m, 0) & data for m in uses.depends.members[run.instruction.name]
        )
        elsewhere |= of_data
        for branch in run.branches:
            sent[branch] |= of_data
    found = {branch for branch, of_data in sent.items() if not of_data}
    return frozenset(found if elsewhere else ())


def _uses(
    module: Module,
    runs: Sequence[tuple[Execution, str]],
    left_out: Collection[tuple[str, int]] = (),
) -> _Uses:
    runs = [(run, kind) for run, kind in runs if not {*run.branches} & {*left_out}]
    reducing = {run.instruction.name for run, kind in runs if kind not in _COPYING}
    depends = dependence(module, [run.instruction for run, _ in runs], reducing, left_out)
    reductions = sum(sum(depends.members[name]) for name in reducing)
    fed = [0] * len(depends.inputs)
    gathers: list[list[Groups]] = [[] for _ in depends.inputs]
    groups: dict[int, Groups] = {}
    alike: dict[Groups, Groups] = {}
    given: dict[int, int] = {}
    for run, kind in runs:
        joined = groups_of(run.instruction, kind, module)
        joined = alike.setdefault(joined, joined)
        for itself, members in _sent(run, kind, depends):
            groups[itself] = joined
            given[itself] = given.get(itself, 0) | members
            for number, member in enumerate(depends.inputs):
                if members & member:
                    fed[number] |= itself
                    if kind in _COPYING and not members & reductions:
                        gathers[number].append(joined)
    reduced = [each & reductions for each in fed]
    return _Uses(depends, groups, fed, reduced, gathers, given)


def _sent(run: Execution, kind: str, depends: Dependence) -> Iterator[tuple[int, int]]:
    """The operands that a collective sends, with their dependences, without scalars."""
    name = run.instruction.name
    # A ragged all-to-all sends only its first operand.
    shapes = operand_shapes(run, kind)
    each = zip(shapes, depends.members[name], depends.operands[name], strict=False)
    for shape, itself, members in each:
        if not all(map(is_scalar, leaves(shape))):
            yield itself, members


def _updates(
    given: Sequence[_Value], results: Sequence[_Value], uses: _Uses
) -> dict[int, set[int]]:
    """For each input that may be a parameter, the outputs that may be its new value."""
    depends = uses.depends
    directly, trained = _reached_and_trained(uses)
    alike: dict[_Value, list[int]] = defaultdict(list)
    for number, value in enumerate(given):
        if value.array.is_inexact and not is_scalar(value.array):
            alike[value].append(number)
    updates: dict[int, set[int]] = {}
    for value, equals in alike.items():
        outputs = [i for i, result in enumerate(results) if result == value]
        # An output that no input of its type reaches directly, such as the mean of the parameters
        # or a lower-precision copy, is paired with an input that it was reduced from.
        candidates = reduce(or_, (depends.inputs[n] for n in equals))
        untaken = {i for i in outputs if not directly[i] & candidates}
        for number in equals:
            found = {i for i in outputs if trained[i] & depends.inputs[number]}
            reduced = {i for i in untaken if uses.reduced[number] & union(depends.outputs[i])}
            if found or reduced:
                updates[number] = found or reduced
    return {n: found for n, found in updates.items() if not _is_state(n, updates, uses)}


def _is_state(number: int, updates: Mapping[int, set[int]], uses: _Uses) -> bool:
    """Whether an input is the optimizer state of unrolled steps.

    A moment feeds the second step's reduction, through its parameters, but not the first one's,
    which also arrives in its new value.
    """
    strange = uses.arriving(updates[number]) & ~uses.fed[number]
    return any(strange & uses.fed[n] and not uses.fed[number] & ~uses.fed[n] for n in updates)


def _reached_and_trained(uses: _Uses) -> tuple[list[int], list[int]]:
    """For each output, the inputs that reach it directly, and those that it is trained from.

    The latter reach the same elements of it both directly and through a reduction.
    """
    depends = uses.depends

    @functools.cache
    def inputs_of(sets: Sets) -> tuple[int, int]:
        reached = trained = 0
        for members in sets:
            for number in _members_of(members, depends.directly):
                reached |= depends.inputs[number]
                if members & uses.reduced[number]:
                    trained |= depends.inputs[number]
        return reached, trained

    found = [inputs_of(sets) for sets in depends.outputs]
    return [reached for reached, _ in found], [trained for _, trained in found]


def _members_of(members: int, of: Sequence[int]) -> Iterator[int]:
    """The indices of a set's members in a contiguous run of bits."""
    first = of[0].bit_length() - 1 if of else 0
    left = members >> first & (1 << len(of)) - 1
    while left:
        index = left.bit_length() - 1
        yield index
        left ^= 1 << index


class _Shards:
    """The number of shards that keep a copy of an input that may be a parameter."""

    def __init__(
        self,
        layouts: Sequence[Pieces],
        uses: _Uses,
        updates: Mapping[int, set[int]],
        batches: Collection[int],
    ) -> None:
        self._layouts = layouts
        self._batches = batches
        self._uses = uses
        self._updates = updates
        self._counted: dict[tuple[object, ...], int] = {}
        split = [number for number, layout in enumerate(layouts) if not is_whole(layout)]
        self._data = [n for n in split if n not in updates and uses.fed[n]]
        # The layouts of layers that are split over devices and never gathered.
        self._layers = {layouts[n] for n in split if n in updates and not uses.gathers[n]}

    def __call__(self, number: int, *, stored_apart: bool = False) -> int:
        """The number of shards.

        Args:
          number: the input.
          stored_apart: whether each device holds its own parameter rather than a piece.
        """
        uses, pieces = self._uses, self._layouts[number]
        way = uses.on_the_way(number, self._updates[number])
        if stored_apart:
            pieces = (0,) * len(pieces)
        fed = [n for n in self._data if uses.fed[n] & way]
        # Moments that the optimizer gathers, as muon does, are not data.
        known = [n for n in fed if n in self._batches] or fed
        data = tuple(dict.fromkeys(self._layouts[n] for n in known))
        joining = {id(found): found for member, found in uses.groups.items() if member & way}
        gathering = {id(found): found for found in uses.gathers[number]}
        operands = (given for member, given in uses.given.items() if member & way)
        by_device = any(given & uses.depends.device for given in operands)
        key = (pieces, frozenset(joining), frozenset(gathering), data, by_device)
        if key not in self._counted:
            seen = self._seen(data, by_device, len(pieces))
            self._counted[key] = shards(pieces, joining.values(), gathering.values(), seen)
        return self._counted[key]

    def batch_of(self, number: int) -> list[object]:
        """For each device its pieces of the batches that an input is trained on; empty if none."""
        reduced = self._uses.reduced[number]
        fed = [n for n in self._data if n in self._batches and self._uses.reduced[n] & reduced]
        pieces = [
            self._layouts[n]
            for n in fed
            if not any(_decides(layer, self._layouts[n]) for layer in self._layers)
        ]
        return list(zip(*pieces, strict=True))

    def _seen(self, data: Sequence[Pieces], by_device: bool, devices: int) -> list[object]:
        """For each device, its pieces of the inputs that are not layers."""
        inputs = [
            layout for layout in data if not any(_decides(layer, layout) for layer in self._layers)
        ] or data
        if not inputs and by_device:
            return list(range(devices))
        return [tuple(layout[device] for layout in inputs) for device in range(devices)]


def _decides(one: Pieces, other: Pieces) -> bool:
    """Whether a device's piece of ``one`` determines its piece of ``other``."""
    return len(set(zip(one, other, strict=True))) == len(set(one))


def _in_loops(module: Module, depends: Dependence, number: int, outputs: Iterable[int]) -> int:
    """The number of updates of an input by loops that carry it, in one call."""
    reached = reduce(or_, (union(depends.outputs[i]) for i in outputs), 0)
    names = {
        name
        for member, (name, begins) in depends.trained.items()
        if member & reached and begins & depends.directly[number]
    }
    if not names:
        return 1
    loops = [run for run in executions(module) if run.instruction.name in names]
    outer = {name for run in loops for name in run.loops}
    return sum(_rounds(module, run) for run in loops if run.instruction.name not in outer)


def _rounds(module: Module, run: Execution) -> int:
    trips = trip_count(module, run.computation, run.instruction)
    return 1 if trips is None or run.times is None else run.times * trips
