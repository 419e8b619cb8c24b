"""The text of compiled programs, without what does not affect computation or communication."""

import hashlib
import itertools
import re

from crossshard.tools.inspection.hlo import parse

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


def instructions(text: str) -> list[str]:
    """The instructions of a normalised program, sorted, without what an order of them changes.

    That is their names, those of their operands, and the numbers of parameters; tuples are left
    out. Programs with the same instructions may still differ in which takes what from which.
    """
    lines = re.findall(r"^  (?:ROOT )?%\S+ = (.+)$", text, re.MULTILINE)
    ordered = re.compile(r"%[\w.\-]+|parameter\(\d+\)|channel_id=\d+|/\*index=\d+\*/")
    return sorted(ordered.sub("", line) for line in lines if " tuple(" not in line)


def _header(text: str) -> list[str]:
    """What is said of the whole module, in HLO text or in normalised text."""
    first, *lines = text.splitlines()
    said = itertools.takewhile(re.compile(r" +[a-z_]+=").match, lines)
    return [*re.split(r", (?=[a-z_]+=)", first)[1:], *map(str.strip, said)]


def _digest(text: str) -> str:
    # Of a tuple's words, so that files that were written before compare.
    return hashlib.sha256(repr((text,)).encode()).hexdigest()[:12]
