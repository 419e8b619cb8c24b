"""Who sends to whom: replica groups in all of XLA's notations, and along which axes they are."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from crossshard.errors import ArgumentError
from crossshard.tools.inspection.hlo import Instruction, Module, sent_to

Groups = tuple[tuple[int, ...], ...]
# The names of the axes of a program's mesh with their sizes, in the order of its devices.
Axes = tuple[tuple[str, int], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}")
_MESH_DEVICES = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_USED_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")

# Without use_global_device_ids, ids are replica ids if there is no channel id. With a channel id
# they are partition ids for these kinds, and ids of full replicas for all others.
_IDS_ARE_PARTITIONS = {
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}


def parse_groups(text: str) -> Groups:
    """Read the value of ``replica_groups``.

    Args:
      text: explicit groups, ``{{0,1},{2,3}}``; the rows of a transposed iota,
        ``[4,2]<=[2,4]T(1,0)``; or axes of a mesh, ``mesh['a'=2,'b'=4] {'b'}``, with an optional
        device order, ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}``.

    Returns:
      The groups; empty for ``{}``, which means one group of all devices.

    Raises:
      ArgumentError: the notation is unknown.

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
    """A transposed iota."""
    lengths = _numbers(dimensions)
    ids = np.arange(math.prod(lengths)).reshape(lengths)
    return ids.transpose(_numbers(order)) if order else ids


def _mesh_devices(text: str | None, number: int) -> np.ndarray:
    """The device ids of a mesh, in its order."""
    if text is None:
        return np.arange(number)
    iota = _MESH_DEVICES.fullmatch(text)
    return _transposed(iota[1], iota[2]).ravel() if iota else np.array(_numbers(text))


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in table.reshape(-1, table.shape[-1]).tolist())


def _over_axes(mesh: str, devices: str | None, used: str) -> Groups:
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
    # A sub-axis, 'a':(2)4, splits its axis in three: the 2 before it, its 4, and the rest.
    parts = [
        (name, int(before or 1), int(before or 1) * int(size or sizes[name]))
        for name, before, size in _USED_AXIS.findall(used)
    ]
    factors: list[int] = []
    starts: list[tuple[str, int]] = []
    for axis, length in sizes.items():
        edges = {1, length}.union(*(part[1:] for part in parts if part[0] == axis))
        for low, high in itertools.pairwise(sorted(edges)):
            factors.append(high // low)
            starts.append((axis, low))
    chosen = [
        i
        for name, low, high in parts
        for i, (axis, start) in enumerate(starts)
        if axis == name and low <= start < high
    ]
    rest = [i for i in range(len(factors)) if i not in chosen]
    ids = _mesh_devices(devices, math.prod(factors)).reshape(factors)
    ids = ids.transpose([*rest, *chosen])
    return _rows(ids.reshape(-1, math.prod(factors[i] for i in chosen)))


def groups_of(collective: Instruction, kind: str, module: Module) -> Groups:
    """The groups of a collective, as device indices.

    Args:
      collective: the instruction.
      kind: its opcode without ``-start``.
      module: the program, for the numbers of replicas and partitions.

    Returns:
      The groups; for a collective-permute, its (source, target) pairs.
    """
    devices = np.arange(module.replicas * module.partitions)
    if collective.sent_as is not None:
        sent = sent_to(collective)
        return tuple(tuple((at - 1) * devices.size + x for at, x in group) for group in sent)
    attributes = collective.attributes
    pairs = kind == "collective-permute"
    text = attributes.get("source_target_pairs" if pairs else "replica_groups", "{}")
    if text.startswith("mesh") and "device_ids" in attributes:
        # They follow a comma, so they were parsed as another attribute.
        text = f"{text}, device_ids={attributes['device_ids']}"
    given = [list(group) for group in parse_groups(text)]
    if pairs and not given:
        return ()
    table = devices.reshape(module.replicas, module.partitions)
    if attributes.get("use_global_device_ids") == "true":
        rows = [devices[group] for group in given or [list(range(devices.size))]]
    elif "channel_id" not in attributes:
        rows = [column[group] for column in table.T for group in given or [[*range(len(column))]]]
    elif kind in _IDS_ARE_PARTITIONS:
        rows = [row[group] for row in table for group in given or [[*range(len(row))]]]
    else:
        rows = [table[group].ravel() for group in given or [[*range(len(table))]]]
    # Every slice runs the same.
    firsts = range(0, module.devices, devices.size)
    return tuple(tuple((row + first).tolist()) for first in firsts for row in rows)


def axes_of(groups: Groups, axes: Axes) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ.

    >>> axes_of(((0, 1), (2, 3)), (("data", 2), ("model", 2)))
    ('model',)
    """
    if not axes:
        return ()
    sizes = [size for _, size in axes]
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.array(np.unravel_index(list(group), sizes))
        differ |= (places != places[:, :1]).any(axis=1)
    return tuple(name for (name, _), along in zip(axes, differ, strict=True) if along)


def joined_shards(
    joining: Iterable[Groups], devices: int, axes: Axes, of_data: Collection[str]
) -> int:
    """The largest number of shards that groups connect, directly or through others.

    Args:
      joining: the groups of some collectives.
      devices: the number of devices.
      axes: those of the mesh; empty if unknown.
      of_data: the axes that split the batch, all if empty: other devices are one shard.

    >>> joined_shards([((0, 1), (2, 3)), ((0, 2), (1, 3))], 8, (), ())
    4
    >>> joined_shards([((0, 1, 2, 3),)], 4, (("data", 2), ("model", 2)), ["data"])
    2
    """
    sizes = [size for _, size in axes] or [devices]
    kept = [not of_data or name in of_data for name, _ in axes] or [True]
    places = np.indices(sizes).reshape(len(sizes), -1)[kept]
    shard = np.unique(places, axis=1, return_inverse=True)[1].ravel()
    leader = np.arange(shard.max() + 1)
    for group in itertools.chain.from_iterable(joining):
        leaders = np.unique(leader[shard[list(group)]])
        if len(leaders) > 1:
            leader[np.isin(leader, leaders)] = leaders[0]
    return max(Counter(leader.tolist()).values())
