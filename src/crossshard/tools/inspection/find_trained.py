"""Finds the parameters of a step in its program: their bytes, shards and updates.

HLO does not mark parameters, but their use does: a gradient depends on the parameters and is
reduced, and each parameter has an output of the same shape, dtype and layout that depends on that
reduction and directly on the parameter. Moments have such outputs too, but the reduction does not
depend on them. A frozen weight feeds the reduction, but reaches outputs only through it or
unchanged.

Nor does HLO mark the shards of the data, but the inputs show them: devices with the same data and
different pieces of the layers are one shard.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from crossshard.tools.inspection.collectives import is_scalar, runs_of_collectives
from crossshard.tools.inspection.execution import Execution
from crossshard.tools.inspection.hlo import Array, Module, Shape, leaves, width
from crossshard.tools.inspection.hlo_dependence import union
from crossshard.tools.inspection.parameters import Parameters
from crossshard.tools.inspection.pieces import Pieces, is_whole
from crossshard.tools.inspection.replicas import joined_devices, shards
from crossshard.tools.inspection.uses import Operand, Uses, union_of


class Trained(NamedTuple):
    """The parameters that a program trains.

    Attributes:
      parameters: by dtype and shards, most bytes first; empty if none is found.
      data: for each device its pieces of the batch that the largest is trained on; empty if none
        is found.
    """

    parameters: tuple[Parameters, ...]
    data: Sequence[object]


class _Value(NamedTuple):
    """The type of an input or output, which a parameter keeps in a step."""

    array: Array
    replicated: bool


def find_trained(module: Module, inputs: Sequence[Pieces], outputs: Sequence[bool]) -> Trained:
    """The parameters, and the data of each device.

    Args:
      module: the program.
      inputs: for each input, the piece that each device holds; all count as replicated if these
        are not the program's.
      outputs: for each output, whether it is replicated; the same.
    """
    devices = module.devices
    shapes = _arrays(each.shape for each in module.entry.parameters)
    results = _arrays([module.entry.root.shape])
    if len(inputs) != len(shapes) or {*map(len, inputs)} - {devices}:
        inputs = [(0,) * devices] * len(shapes)
    if len(outputs) != len(results):
        outputs = [True] * len(results)
    given = [_Value(array, is_whole(pieces)) for array, pieces in zip(shapes, inputs, strict=True)]
    # Unlike a state, a batch is not returned.
    batches = {n for n, array in enumerate(shapes) if array not in results}
    runs = list(runs_of_collectives(module))
    uses = Uses(module, runs)
    if left_out := _without_data(runs, uses, batches):
        uses = Uses(module, runs, left_out)
    updates = _updates(given, list(map(_Value, results, outputs)), uses)
    data = _Data(inputs, uses, updates, batches)
    kept = {n: found for n in updates if (found := data.shards(n)) > 1}
    if not kept:
        # As with groups, where each device stores its own parameters, like its batch.
        kept = {n: found for n in updates if (found := data.shards(n, stored_apart=True)) > 1}
    if not kept:
        return Trained((), ())
    wires = _Wires({n: shapes[n] for n in kept}, updates, uses)
    copies: dict[_Value, list[tuple[int, int, int, int, int]]] = defaultdict(list)
    outputs_of: dict[_Value, set[int]] = defaultdict(set)
    for number, count in kept.items():
        gathered = joined_devices(uses.gathers[number], devices)
        often = uses.in_loops(number, updates[number]) * uses.in_a_row(number, updates[number])
        pieces = min(gathered, len(set(inputs[number])))
        copies[given[number]].append((pieces, count, often, *wires.of(number, pieces, often)))
        outputs_of[given[number]] |= updates[number]
    bytes_of: Counter[tuple[str, int, int]] = Counter()
    gathered_of, reduced_of = Counter[tuple[str, int, int]](), Counter[tuple[str, int, int]]()
    for value, inputs_alike in copies.items():
        # Two inputs cannot both be updated to one output.
        distinct = sorted(inputs_alike, reverse=True)[: len(outputs_of[value])]
        for pieces, count, often, gathered, reduced in distinct:
            kind = value.array.dtype, count, often
            bytes_of[kind] += pieces * value.array.bytes
            gathered_of[kind] += gathered
            reduced_of[kind] += reduced
    parameters = tuple(
        Parameters(
            *(dtype, total, count, often),
            *(None if sent == total else sent for sent in (gathered_of[kind], reduced_of[kind])),
        )
        for kind, total in bytes_of.most_common()
        for dtype, count, often in [kind]
    )
    seen = data.seen(max(kept, key=lambda n: shapes[n].bytes))
    return Trained(parameters, seen if len(set(seen)) > 1 else ())


class _Wires:
    """What programs send of parameters that rest in parts.

    Args:
      arrays: the piece of each parameter on one device, by the number of its input.
      updates: the outputs of each.
      uses: how they are used.
    """

    def __init__(self, arrays: dict[int, Array], updates: dict[int, set[int]], uses: Uses) -> None:
        self._arrays = arrays
        self._updates = updates
        self._uses = uses
        self._gathers = {number: uses.gathered(number) for number in arrays}

    def of(self, number: int, pieces: int, often: int) -> tuple[int, int]:
        """The bytes of what an update gathers of a parameter, and of the gradient that it reduces.

        Those of the whole parameter, in the dtype that is sent if it has fewer bits. What is
        gathered again, as ``jax.checkpoint`` does, counts twice, and no oftener.

        Args:
          number: the parameter.
          pieces: the number of pieces that make a whole one; 1 if it rests whole.
          often: the updates in one call.
        """
        piece = self._arrays[number]
        whole, bits = pieces * piece.bytes, width(piece.dtype)
        gathers = self._gathers[number]
        if pieces == 1 or not gathers:
            return whole, whole
        sent = sum(each.bytes_sent * self._share(number, each) for each in gathers)
        wire = max(each.width for each in gathers) / bits
        once = (pieces - 1) * piece.bytes * wire * often
        passes = 2 if sent > 1.5 * once else 1
        reductions = self._uses.arriving(self._updates[number])
        summed = max((each.width for each in reductions), default=bits) / bits
        return round(passes * whole * min(wire, 1)), round(whole * min(summed, 1))

    def _share(self, number: int, gather: Operand) -> float:
        """The share of a parameter in what is gathered together, which has the same rows of all."""
        together = [n for n, found in self._gathers.items() if gather in found]
        return self._arrays[number].bytes / sum(self._arrays[n].bytes for n in together)


def _arrays(shapes: Iterable[Shape]) -> list[Array]:
    return [array for shape in shapes for array in leaves(shape)]


def _without_data(
    runs: Sequence[tuple[Execution, str]], uses: Uses, batches: Iterable[int]
) -> frozenset[tuple[str, int]]:
    """The branches of conditionals that send nothing of a batch, if all gradients are elsewhere.

    Such a branch is no step: copies of the parameters, and of all else, are made equal in it.
    """
    depends = uses.depends
    data = union_of(depends.inputs[n].any for n in batches)
    sent: dict[tuple[str, int], bool] = defaultdict(bool)
    elsewhere = False
    for run, _ in runs:
        operands = depends.operands[run.instruction.name]
        of_data = any(depends.given[each.any] & data for each in operands)
        elsewhere |= of_data
        for branch in run.branches:
            sent[branch] |= of_data
    return frozenset(branch for branch in sent if not sent[branch] and elsewhere)


def _updates(given: Sequence[_Value], results: Sequence[_Value], uses: Uses) -> dict[int, set[int]]:
    """For each input that may be a parameter, the outputs that may be its new value."""
    alike: dict[_Value, list[int]] = defaultdict(list)
    for number, value in enumerate(given):
        if value.array.is_inexact and not is_scalar(value.array):
            alike[value].append(number)
    updates: dict[int, set[int]] = {}
    for value, equals in alike.items():
        sets = {i: uses.depends.outputs[i] for i, result in enumerate(results) if result == value}
        # An output that no input of its type reaches directly, such as the mean of the parameters
        # or a lower-precision copy, is paired with an input that it was reduced from.
        directly = union_of(uses.depends.inputs[n].direct for n in equals)
        untaken = {i for i in sets if not union(sets[i]) & directly}
        for number in equals:
            direct, reduced = uses.depends.inputs[number].direct, uses.reduced[number]
            # The same elements of it are reached both directly and through a reduction.
            found = {i for i in sets if any(x & direct and x & reduced for x in sets[i])}
            found = found or {i for i in untaken if union(sets[i]) & reduced}
            if found:
                updates[number] = found
    return {n: found for n, found in updates.items() if not _is_state(n, updates, uses)}


def _is_state(number: int, updates: dict[int, set[int]], uses: Uses) -> bool:
    """Whether an input is the optimizer state of unrolled steps.

    A moment feeds the second step's reduction, through its parameters, but not the first one's,
    which also arrives in its new value.
    """
    arriving, feeds = uses.reached(updates[number]), {x.source.any for x in uses.fed[number]}
    strange = {x.source.any for x in uses.operands if x.source.direct & arriving} - feeds
    others = [{x.source.any for x in uses.fed[n]} for n in updates] if strange else []
    return any(strange & other and feeds <= other for other in others)


class _Data:
    """Which devices see different data, and so are different shards.

    Args:
      layouts: for each input, the piece that each device holds.
      uses: how they are used.
      updates: the inputs that may be parameters, with their outputs.
      batches: the inputs that are not returned.
    """

    def __init__(
        self,
        layouts: Sequence[Pieces],
        uses: Uses,
        updates: dict[int, set[int]],
        batches: Collection[int],
    ) -> None:
        self._layouts = layouts
        self._uses = uses
        self._updates = updates
        self._batches = batches
        split = [number for number, layout in enumerate(layouts) if not is_whole(layout)]
        self._split = [n for n in split if n not in updates and uses.fed[n]]
        # The layouts of layers that are split over devices and never gathered.
        self._layers = frozenset(layouts[n] for n in split if n in updates and not uses.gathers[n])

    def shards(self, number: int, *, stored_apart: bool = False) -> int:
        """The number of shards that keep a copy of an input that may be a parameter.

        Args:
          number: the input.
          stored_apart: whether each device holds its own parameter rather than a piece.
        """
        pieces = self._layouts[number]
        return shards(
            (0,) * len(pieces) if stored_apart else pieces,
            frozenset(each.groups for each in self._way(number)),
            frozenset(self._uses.gathers[number]),
            self.seen(number),
        )

    def seen(self, number: int) -> tuple[object, ...]:
        """For each device, its pieces of the data that an input is trained on."""
        way = union_of(each.source.any for each in self._way(number))
        fed = [n for n in self._split if any(x.source.any & way for x in self._uses.fed[n])]
        # Moments that the optimizer gathers, as muon does, are not data.
        fed = [n for n in fed if n in self._batches] or fed
        by_device = any(each.given & self._uses.depends.device.any for each in self._way(number))
        if by_device and not fed:
            return tuple(range(len(self._layouts[number])))
        data = tuple(dict.fromkeys(self._layouts[n] for n in fed))
        return _seen(data, self._layers, len(self._layouts[number]))

    def _way(self, number: int) -> list[Operand]:
        """The operands of collectives between an input and its new value."""
        reached = self._uses.reached(self._updates[number])
        return [each for each in self._uses.fed[number] if each.source.any & reached]


@functools.lru_cache
def _seen(
    data: tuple[Pieces, ...], layers: frozenset[Pieces], devices: int
) -> tuple[tuple[int, ...], ...]:
    """For each device, its pieces of inputs, without those that are split as layers are."""
    inputs = [each for each in data if not any(_decides(layer, each) for layer in layers)] or data
    return tuple(tuple(layout[device] for layout in inputs) for device in range(devices))


def _decides(one: Pieces, other: Pieces) -> bool:
    """Whether a device's piece of ``one`` determines its piece of ``other``."""
    return len(set(zip(one, other, strict=True))) == len(set(one))
