"""Which devices a program joins, and how many of them keep a parameter the same."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

from crossshard.inspection.groups import Groups


def joined_devices(joining: Iterable[Groups], devices: int) -> int:
    """How many devices collectives join: those that are linked by groups, at most.

    Groups over one axis of a mesh and then over another join the devices of both; groups that stay
    apart do not.

    >>> joined_devices([((0, 1), (2, 3)), ((0, 2), (1, 3))], 8)
    4
    """
    return max(Counter(_leaders(joining, devices)).values())


def shards(
    pieces: Sequence[int],
    joining: Iterable[Groups],
    gathering: Iterable[Groups],
    data: Sequence[Hashable],
) -> int:
    """Over how many shards a parameter is kept the same: the devices that see different data.

    These are devices that hold the same piece of it, or gather each other's pieces. The devices
    over which a layer is split, and which work together on the same data, are one shard.

    Args:
      pieces: per device, which piece of the parameter it holds.
      joining: the groups of the collectives between the parameter and its new value.
      gathering: the groups over which its pieces are gathered.
      data: per device, what it sees.

    >>> eight = ((0, 1, 2, 3, 4, 5, 6, 7),)
    >>> shards([0, 1] * 4, [eight], [], data=[0, 0, 1, 1, 2, 2, 3, 3])
    4
    """
    joined = _leaders(joining, len(pieces))
    holders: dict[Hashable, list[int]] = defaultdict(list)
    for device, piece in enumerate(pieces):
        holders[joined[device], piece].append(device)
    kept = _leaders([*gathering, tuple(map(tuple, holders.values()))], len(pieces))
    seen: dict[int, set[Hashable]] = defaultdict(set)
    for device, leader in enumerate(kept):
        seen[leader].add(data[device])
    return max(map(len, seen.values()))


def _leaders(joining: Iterable[Groups], devices: int) -> list[int]:
    """Per device, one that stands for all that it is linked with."""
    leader = list(range(devices))

    def lead(device: int) -> int:
        while leader[device] != device:
            leader[device] = leader[leader[device]]
            device = leader[device]
        return device

    for groups in joining:
        for first, *others in groups:
            for other in others:
                leader[lead(other)] = lead(first)
    return [lead(device) for device in range(devices)]
