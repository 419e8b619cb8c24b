"""Parser for the text of optimized HLO modules: instructions, groups of devices, source lines.

The text is stable across JAX versions; the objects behind it are private. Attributes are parsed
lazily, because a pod's program has megabytes of them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from crossshard.errors import ArgumentError

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([\w\-]+)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_OURS = f"{Path(__file__).parents[2]}/"

# The libraries that a training script calls, and the standard library.
_LIBRARIES = re.compile(
    r"/(site|dist)-packages/(equinox|flax|jax|jaxtyping|optax)/"
    r"|/lib/python3[^/]*/(?!site-packages/|dist-packages/)"
    r"|^<frozen "
)

# XLA's names of the collectives between slices.
_BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_SLICES = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})')
# Slices are numbered from 1. The device ids of slice n begin at n times this number.
_IDS_PER_SLICE = 100_000

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}")
_MESH_DEVICES = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_USED_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")

# The groups of these kinds have ids of devices. Without use_global_device_ids, those of all others
# have ids of replicas, and there is only one replica.
_BY_DEVICE = {"all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast"}


def width(dtype: str) -> int:
    """Return the bits per element of an XLA dtype."""
    bits = _BITS.match(dtype)
    # pred takes a byte; tokens and opaque values take none.
    return int(bits[1]) if bits else 8 if dtype == "pred" else 0


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape of one array on one device.

    Attributes:
      dtype: XLA's name of its dtype: ``f32``, ``bf16``, ``pred``, ``s4``.
      dimensions: its shape, with the bounds of dynamic dimensions.
    """

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Its size in bytes, without layout padding."""
        return math.ceil(self.size * width(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"


# An array, or a tuple of shapes.
Shape = Array | tuple["Shape", ...]


def leaves(shape: Shape) -> Iterator[Array]:
    """Yield the arrays in a shape, in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str  # without the %
    opcode: str
    shape: Shape
    operands: tuple[str, ...]  # their names, in the same computation
    is_root: bool
    argument: str  # the text in parentheses; for a parameter, its number
    text: str  # all after the name
    _end: int

    @property
    def rest(self) -> str:
        """The text after the parentheses."""
        return self.text[self._end :]

    @functools.cached_property
    def attributes(self) -> Mapping[str, str]:
        """The attributes by name, each as its text."""
        return _attributes(self.rest)

    def quoted(self, attribute: str, key: str) -> str | None:
        """Return the value of ``key="…"``, or ``"key":"…"`` in JSON, in an attribute."""
        text = self.attributes.get(attribute, "")
        found = re.search(rf'\b{key}"?[=:]"((?:[^"\\]|\\.)*)"', text)
        return _unescaped(found[1]) if found else None

    @functools.cached_property
    def sent_as(self) -> str | None:
        """The kind of collective between slices of a TPU that this instruction starts, if any.

        Every slice runs the same program. Its collectives over all slices are a ``send`` to the
        network between them and a ``recv``, which have the same rendezvous.
        """
        if self.opcode != "send":
            return None
        name = self.quoted("frontend_attributes", "_xla_megascale_transfer_type")
        return _BETWEEN_SLICES.get(name or "")

    @property
    def rendezvous(self) -> str | None:
        """The rendezvous that a send shares with its recv."""
        return self.quoted("frontend_attributes", "_xla_host_transfer_rendezvous")

    def called(self, attribute: str) -> tuple[str, ...]:
        """Return the names of the computations in an attribute."""
        return tuple(_NAME.findall(self.attributes.get(attribute, "")))


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions by name, in the order in which they run."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The root instruction, whose value the computation returns."""
        return next(each for each in self.instructions.values() if each.is_root)


@dataclasses.dataclass(frozen=True)
class Module:
    """An HLO module."""

    computations: Mapping[str, Computation]
    entry: Computation
    partitions: int
    _frames: Mapping[int, tuple[str, int]]

    @functools.cached_property
    def slices(self) -> int:
        """The number of slices of a TPU that run it, each with all partitions."""
        each = (x for one in self.computations.values() for x in one.instructions.values())
        groups = (
            group for x in each if x.sent_as is not None for group in _groups_between_slices(x)
        )
        return max((slice_ for group in groups for slice_, _ in group), default=1)

    @property
    def devices(self) -> int:
        """The number of devices that run it."""
        return self.partitions * self.slices

    def lines(self, instruction: Instruction) -> tuple[str, ...]:
        """Return the ``file:line`` of an instruction and of its callers, innermost first.

        Empty if unknown.
        """
        # Names may contain text that looks like an attribute.
        metadata = _QUOTED.sub('""', instruction.attributes.get("metadata", ""))
        found: list[str] = []
        frame = re.search(r"\bstack_frame_id=(\d+)", metadata)
        number = int(frame[1]) if frame else 0
        while number in self._frames:
            line_of_frame, number = self._frames[number]
            found.append(line_of_frame)
        return tuple(found)


def parse(text: str) -> Module:
    """Parse a module from the output of ``compiled.as_text()``.

    >>> module = parse('''HloModule tiny, num_partitions=2
    ...
    ... ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %twice = f32[4]{0} add(%p, %p)
    ... }''')
    >>> module.partitions, module.entry.root.opcode, module.entry.root.operands
    (2, 'add', ('p', 'p'))
    """
    header, _, _ = text.partition("\n")
    if not header.startswith("HloModule"):
        raise ArgumentError(f"The program's text must be an HLO module; it starts {header[:80]!r}.")
    settings = _attributes(header)
    if (replicas := settings.get("replica_count", "1")) != "1":
        raise ArgumentError(
            f"The program runs as {replicas} replicas, whose groups are not read: jax.jit makes "
            "partitions. Map the step over a mesh, with jax.shard_map."
        )
    computations, entry = _computations(text)
    if entry is None:
        raise ArgumentError(f"The program's text has no entry computation: {header[:80]!r}.")
    return Module(
        computations,
        entry,
        partitions=int(settings.get("num_partitions", 1)),
        _frames=_stack_frames(text),
    )


def _computations(text: str) -> tuple[dict[str, Computation], Computation | None]:
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if current is not None and (line[:1] == " "):
            instruction = _instruction(line)
            current[instruction.name] = instruction
        elif head := _COMPUTATION.match(line):
            current = {}
            computations[head[2]] = Computation(head[2], current)
            if head[1]:
                entry = computations[head[2]]
        else:
            current = None
    return computations, entry


def _instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    if head is None:
        raise ArgumentError(_unknown("instruction", line))
    shape_end = end_of_bracket(line, head.end()) if line[head.end()] == "(" else head.end()
    opcode = _OPCODE.search(line, shape_end)
    if opcode is None:
        raise ArgumentError(_unknown("instruction", line))
    opening = opcode.end() - 1
    closing = end_of_bracket(line, opening)
    argument = line[opening + 1 : closing - 1]
    # A constant's text may contain anything.
    operands = () if opcode[1] == "constant" else tuple(_NAME.findall(argument))
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        shape=_shape(line[head.end() : opcode.start()]),
        operands=operands,
        is_root=bool(head[1]),
        argument=argument,
        text=line[head.end() :],
        _end=closing - head.end(),
    )


def _tokens(text: str, start: int = 0) -> Iterator[tuple[re.Match[str], int]]:
    """Yield brackets, commas and quoted texts, each with the number of brackets open after it."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in "({[") - (token[0] in ")}]")
        yield token, depth


def end_of_bracket(text: str, opening: int) -> int:
    """Return the index after the matching bracket."""
    for token, depth in _tokens(text, opening):
        if depth == 0:
            return token.end()
    raise ArgumentError(f"The program's text has an unclosed bracket: {text[opening:][:80]!r}.")


def _split(text: str) -> list[str]:
    """Split a text at the commas outside of brackets and quotes."""
    parts, start = [], 0
    for token, depth in _tokens(text):
        if token[0] == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _attributes(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in _split(text))
    return {key: value for key, equals, value in pairs if equals}


def _shape(text: str) -> Shape:
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        inner = text[1 : end_of_bracket(text, 0) - 1]
        return tuple(_shape(part) for part in _split(inner)) if inner.strip() else ()
    array = _ARRAY.match(text)
    if array is None:
        raise ArgumentError(_unknown("shape", text))
    return Array(array[1], tuple(int(n) for n in re.findall(r"\d+", array[2])))


def _unknown(what: str, text: str) -> str:
    return f"The program's text has an unknown {what}: {text.strip()[:80]!r}."


# Groups of devices: replica groups in all of XLA's notations, and groups between slices.


def parse_groups(text: str) -> Groups:
    """Read the value of ``replica_groups``; empty for ``{}``, which means one group of all.

    The value is a list of groups, ``{{0,1},{2,3}}``; the rows of a transposed iota,
    ``[4,2]<=[2,4]T(1,0)``; or axes of a mesh, ``mesh['a'=2,'b'=4] {'b'}``, with an optional device
    order, ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}``.

    >>> parse_groups("{{0,1},{2,3}}")
    ((0, 1), (2, 3))
    >>> parse_groups("[4,2]<=[2,4]T(1,0)")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> parse_groups("mesh['a'=2,'b'=2] {'a'}")
    ((0, 2), (1, 3))
    """
    if iota := _IOTA.fullmatch(text):
        return _rows(_transposed(iota[2], iota[3]).reshape(_numbers(iota[1])))
    if mesh := _MESH.fullmatch(text):
        return _over_axes(mesh[1], mesh[2], mesh[3])
    if text.startswith("{"):
        inner = re.findall(r"\{([\d,\s]*)\}", text[1:-1])
        return tuple(tuple(int(i) for i in re.findall(r"\d+", group)) for group in inner)
    raise ArgumentError(
        f"The program's text has replica groups of an unknown form: {text[:120]!r}."
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _transposed(dimensions: str, order: str | None) -> np.ndarray:
    """Return a transposed iota."""
    lengths = _numbers(dimensions)
    ids = np.arange(math.prod(lengths)).reshape(lengths)
    return ids.transpose(_numbers(order)) if order else ids


def _mesh_devices(text: str | None, number: int) -> np.ndarray:
    """Return the device ids of a mesh, in its order."""
    if text is None:
        return np.arange(number)
    iota = _MESH_DEVICES.fullmatch(text)
    return _transposed(iota[1], iota[2]).ravel() if iota else np.array(_numbers(text))


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in table.reshape(-1, table.shape[-1]).tolist())


def _over_axes(mesh: str, devices: str | None, used: str) -> Groups:
    """Return the groups of devices that differ only along the used axes of a mesh."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    apart = dict(zip(sizes, places, strict=True))
    within, members = [], 1
    for name, before, part in _USED_AXIS.findall(used):
        # A sub-axis, 'a':(2)4, splits its axis in three: the 2 before it, its 4, and the rest.
        size = int(part or sizes[name])
        rest = sizes[name] // (int(before or 1) * size)
        digit = apart[name] // rest % size
        apart[name] = apart[name] - digit * rest
        within.append(digit)
        members *= size
    order = np.lexsort([*within[::-1], *list(apart.values())[::-1]])
    return _rows(_mesh_devices(devices, len(order))[order].reshape(-1, members))


def groups_of(collective: Instruction, kind: str, module: Module) -> Groups:
    """Return the groups of a collective as device indices; of a permute, (source, target) pairs."""
    size, attributes = module.partitions, collective.attributes
    if collective.sent_as is not None:
        sent = _groups_between_slices(collective)
        return tuple(tuple((at - 1) * size + x for at, x in group) for group in sent)
    if kind == "collective-permute":
        given = parse_groups(attributes.get("source_target_pairs", "{}"))
    else:
        text = attributes.get("replica_groups", "{}")
        if text.startswith("mesh") and "device_ids" in attributes:
            # The device ids follow a comma, so they were parsed as another attribute.
            text = f"{text}, device_ids={attributes['device_ids']}"
        by_device = kind in _BY_DEVICE or attributes.get("use_global_device_ids") == "true"
        given = (parse_groups(text) if by_device else ()) or (tuple(range(size)),)
    # Every slice runs the same program.
    firsts = range(0, module.devices, size)
    return tuple(tuple(first + x for x in group) for first in firsts for group in given)


def _groups_between_slices(send: Instruction) -> list[list[tuple[int, int]]]:
    """Return the groups between slices; each device is its slice, from 1, and its place there."""
    found = _SLICES.search(send.attributes.get("frontend_attributes", ""))
    text = found[1] if found else ""
    if text.startswith('"'):
        # The same devices of several slices: {1,2}x{0:3}.
        slices, places = (_parse_ranges(part) for part in text.strip('"').split("x"))
        return [[(place, at) for place in slices] for at in places]
    groups = re.findall(r"\{([\d,>-]+)\}", text)
    return [[divmod(int(n), _IDS_PER_SLICE) for n in re.findall(r"\d+", group)] for group in groups]


def _parse_ranges(text: str) -> list[int]:
    """Return the numbers of ``{1,2}`` or ``{0:3}``; the end of a range is included."""
    found: list[int] = []
    for part in text.strip("{}").split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found


# Source lines.


def users_line(lines: Iterable[str]) -> str | None:
    """Return the first line in user code, outside crossshard and other libraries.

    The lines are innermost first.

    >>> users_line(["/lib/python3.11/site-packages/flax/nnx/norm.py:9", "train.py:12", "main.py:3"])
    'train.py:12'
    """
    return next((line for line in lines if not (_is_ours(line) or _LIBRARIES.search(line))), None)


def source_of(lines: Iterable[str]) -> str | None:
    """Return the first line in user code, or if there is none, the first outside crossshard."""
    lines = list(lines)
    return users_line(lines) or next((line for line in lines if not _is_ours(line)), None)


def _is_ours(line: str) -> bool:
    return line.startswith(_OURS) or "-packages/crossshard/" in line


def _unescaped(text: str) -> str:
    """Return a quoted text without the backslashes."""
    return re.sub(r"\\(.)", r"\1", text)


def _stack_frames(text: str) -> dict[int, tuple[str, int]]:
    """Read the tables that newer XLA writes above a program: each frame's line and caller."""
    names = re.finditer(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M)
    files = {m[1]: _unescaped(m[2]) for m in names}
    location = r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"
    lines = {
        m[1]: f"{files.get(m[2], '?')}:{m[3]}"
        for m in re.finditer(location, _section(text, "FileLocations"), re.M)
    }
    frame = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    frames = re.findall(frame, _section(text, "StackFrames"), re.M)
    # XLA writes the caller's number plus one, so the outermost frame, which has no caller, appears
    # to call itself.
    offset = int(any(number == parent for number, _, parent in frames))
    return {
        int(number): (lines[where], int(parent or 0) - offset)
        for number, where, parent in frames
        if where in lines
    }


def _section(text: str, title: str) -> str:
    start = text.find(f"\n{title}\n")
    if start < 0:
        return ""
    start += len(title) + 2
    end = text.find("\n\n", start)
    return text[start : end if end >= 0 else None]
