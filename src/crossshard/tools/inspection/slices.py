"""Slices: what XLA sends between the slices of a TPU, as the collectives that it was.

A program for several slices is that of one, whose collectives over all of them are a `send` to the
network between them and a `recv`.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from crossshard.tools.inspection.hlo import Computation, Instruction, Module

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})')
# The first slice is 1. The ids of its devices begin here, those of the second at twice this.
_OF_A_SLICE = 100_000
_GROUPS = list[list[tuple[int, int]]]


def with_slices(module: Module) -> Module:
    """A module with ``…-start`` and ``…-done`` in place of what is sent between slices.

    Their groups are of the devices of all slices, one slice after the other.
    """
    sends = [
        each
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if _kind(each)
    ]
    if not sends:
        return module
    slices = max(place for each in sends for group in _groups(each) for place, _ in group)
    size = module.partitions * module.replicas
    computations = {
        name: Computation(name, dict(_rewritten(each.instructions.values(), size)))
        for name, each in module.computations.items()
    }
    entry = computations[module.entry.name]
    return dataclasses.replace(module, computations=computations, entry=entry, slices=slices)


def _rewritten(instructions: Iterable[Instruction], size: int) -> Iterator[tuple[str, Instruction]]:
    """The instructions of a computation by name, with those that send and receive as one pair."""
    instructions = list(instructions)
    sends = {_rendezvous(each): each for each in instructions if _kind(each)}
    received = {
        each.name: sends[_rendezvous(each)]
        for each in instructions
        if each.opcode == "recv" and _rendezvous(each) in sends
    }
    for each in instructions:
        kind = _kind(each)
        if kind is not None:
            ids = ([(place - 1) * size + at for place, at in group] for group in _groups(each))
            text = ",".join(f"{{{','.join(map(str, group))}}}" for group in ids)
            name = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
            text = f"{each.text}, {name}={{{text}}}, between_slices=true"
            # The other operand is a token.
            each = dataclasses.replace(
                each, opcode=f"{kind}-start", operands=each.operands[:1], text=text
            )
        elif each.opcode == "recv-done" and each.operands[0] in received:
            start = received[each.operands[0]]
            operands = (start.name, *each.operands)
            each = dataclasses.replace(each, opcode=f"{_kind(start)}-done", operands=operands)
        yield each.name, each


def _kind(instruction: Instruction) -> str | None:
    if instruction.opcode != "send":
        return None
    name = instruction.quoted("frontend_attributes", "_xla_megascale_transfer_type")
    return _KINDS.get(name or "")


def _rendezvous(instruction: Instruction) -> str | None:
    return instruction.quoted("frontend_attributes", "_xla_host_transfer_rendezvous")


def _groups(send: Instruction) -> _GROUPS:
    """The groups that send to each other: of each device its slice, from 1, and its place in it."""
    found = _TARGET.search(send.attributes.get("frontend_attributes", ""))
    text = found[1] if found else ""
    if text.startswith('"'):
        # The same devices of some slices: {1,2}x{0:3}.
        slices, places = (_numbers(part) for part in text.strip('"').split("x"))
        return [[(place, at) for place in slices] for at in places]
    groups = re.findall(r"\{([\d,>-]+)\}", text)
    return [[divmod(int(n), _OF_A_SLICE) for n in re.findall(r"\d+", group)] for group in groups]


def _numbers(text: str) -> list[int]:
    """``{1,2}`` and ``{0:3}``, of which the last number belongs to it."""
    found: list[int] = []
    for part in text.strip("{}").split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found
