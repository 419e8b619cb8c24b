"""The text of compiled programs, without what does not affect computation or communication."""

import hashlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

from crossshard.tools.inspection.hlo import Computation, parse

_NAME = re.compile(r"%([\w.\-]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-\w+|reduce-scatter)(-start)?\("
)


def sends(text: str) -> bool:
    """Whether a program has a collective."""
    return _COLLECTIVE.search(text) is not None


def normalised(text: str) -> str:
    """HLO text with names that depend on nothing but the program.

    Instructions are numbered per opcode in their order, so that one more of a kind renames no
    other; computations are named by their content; channels are numbered as they are met. The
    module's name, metadata, and the names of parameters are gone.
    """
    text = re.sub(r',? metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", text)
    module = parse(text)
    computations = module.computations
    channels: dict[str, int] = {}
    named: dict[str, str] = {}
    bodies: dict[str, str] = {}

    def channel(found: re.Match[str]) -> str:
        return f"channel_id={channels.setdefault(found[1], len(channels) + 1)}"

    def body(computation: str) -> str:
        counts: dict[str, itertools.count[int]] = {}
        names: dict[str, str] = {}

        def renamed(found: re.Match[str]) -> str:
            name = found[1]
            if name in names and name in computations:
                raise ValueError(f"An instruction and a computation are both named {name}.")
            if name in computations:
                return f"%{name_of(name)}"
            return f"%{names.get(name, name)}"

        lines = []
        for instruction in computations[computation].instructions.values():
            opcode = instruction.opcode
            name = f"{opcode}.{next(counts.setdefault(opcode, itertools.count(1)))}"
            rest = _CHANNEL.sub(channel, _NAME.sub(renamed, instruction.text))
            names[instruction.name] = name
            lines.append(f"  {'ROOT ' * instruction.is_root}%{name} = {rest}\n")
        return "".join(lines)

    def name_of(computation: str) -> str:
        if computation not in named:
            made = body(computation)
            named[computation] = f"computation.{_digest(made)}"
            bodies[named[computation]] = made
        return named[computation]

    first = body(module.entry.name)
    said = "".join(f"  {each}\n" for each in _header(text))
    others = "".join(f"\n%{name} {{\n{lines}}}\n" for name, lines in bodies.items())
    return f"HloModule step\n{said}\nENTRY %entry {{\n{first}}}\n{others}"


def regardless_of_order(text: str) -> list[str]:
    """What two programs have in common if they differ in an order alone.

    That is the order of instructions, of parameters, of results, and of what enters a fusion. Each
    instruction has a colour, which is refined by those of its operands and users until that tells
    no more of them apart (Weisfeiler and Leman). Two programs whose colours are the same could
    still differ, but only if they are so symmetric that no instruction's surroundings show it.
    """
    module, header = parse(text), _header(text)
    graph = _Graph(module.computations, ordered=False)
    returned = graph.add(module.entry.name)
    for result, number, kind in re.findall(
        r"\{(\d*)\}: \((\d+), \{\}, ([\w-]+)\)", " ".join(header)
    ):
        graph.edges.append((kind, graph.parameters[int(number)], returned[int(result or 0)]))
    # Layouts are at the parameters and results, and aliases are edges.
    whole = [said for said in header if not re.match("input_output|entry_comp", said)]
    # A flag for each parameter is in their order.
    return [*(re.sub(r"\{(.*)\}", _in_order, said) for said in whole), *graph.colours()]


def _header(text: str) -> list[str]:
    """What is said of the whole module, in HLO text or in normalised text."""
    first, *lines = text.splitlines()
    said = itertools.takewhile(re.compile(r" +[a-z_]+=").match, lines)
    return [*re.split(r", (?=[a-z_]+=)", first)[1:], *map(str.strip, said)]


def _in_order(found: re.Match[str]) -> str:
    return f"{{{','.join(sorted(found[1].split(',')))}}}"


class _Graph:
    """The instructions of a program and of its fusions, and which of them takes what from which."""

    def __init__(self, computations: Mapping[str, Computation], ordered: bool):
        self._computations = computations
        self._ordered = ordered
        self._values: dict[str, str] = {}
        self._own: dict[str, str] = {}
        self.edges: list[tuple[str, str, str]] = []
        self.parameters: dict[int, str] = {}

    def add(self, computation: str, fusion: str = "", given: tuple[str, ...] = ()) -> list[str]:
        """Adds the instructions of a computation; returns what it returns, or its parts."""
        nodes: dict[str, str] = {}
        returned: list[str] = []
        for instruction in self._computations[computation].instructions.values():
            opcode, text = instruction.opcode, instruction.text
            operands = tuple(nodes[name] for name in _NAME.findall(text) if name in nodes)
            if opcode == "parameter":
                number = int(re.findall(r" parameter\((\d+)\)", text)[0])
                if fusion:
                    nodes[instruction.name] = given[number]
                    continue
                # Whoever calls a loop's body, say, goes by the numbers.
                text = text if self._ordered else text.replace(f" parameter({number})", "")
                self.parameters[number] = f"/{instruction.name}"
            node = nodes[instruction.name] = f"{fusion}/{instruction.name}"
            called = [name for name in _NAME.findall(text) if name in self._computations]
            if opcode in ("fusion", "call"):
                inside = self.add(called[0], node, operands)
                self.edges += [(f"result {place}", node, one) for place, one in enumerate(inside)]
                operands = ()
                text = text.replace(called[0], "")
            results = instruction.is_root and opcode == "tuple" and not (fusion or self._ordered)
            labels = ("result" if results else f"operand {place}" for place in itertools.count())
            self.edges += [(next(labels), node, operand) for operand in operands]
            self.edges += [("inside", node, fusion)] * bool(fusion)
            self._own[node] = "results" if results else self._text(text)
            if instruction.is_root:
                returned = list(operands) if results else [node]
        return returned

    def colours(self) -> list[str]:
        """The sorted colours of all instructions."""
        colours = {node: _digest(own) for node, own in self._own.items()}
        number = 0
        while number < len(set(colours.values())):
            number = len(set(colours.values()))
            seen: dict[str, list[tuple[str, str]]] = {node: [] for node in colours}
            for label, one, other in self.edges:
                seen[one].append((label, colours[other]))
                seen[other].append((f"{label} of", colours[one]))
            colours = {node: _digest(colours[node], sorted(seen[node])) for node in colours}
        return sorted(colours.values())

    def _text(self, text: str) -> str:
        """An instruction without the names of its operands, with what it calls by value."""
        text = _NAME.sub(lambda found: self._value_of(found[1]), text)
        return re.sub(r"channel_id=\d+|/\*index=\d+\*/", "", text)

    def _value_of(self, name: str) -> str:
        if name not in self._computations:
            return ""
        if name not in self._values:
            within = _Graph(self._computations, ordered=True)
            within.add(name)
            self._values[name] = _digest(within.colours())
        return self._values[name]


def _digest(*what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]
