"""The devices that collectives connect, and the number that keep a copy of a parameter."""

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable

from crossshard.tools.inspection.replica_groups import Groups


def joined_devices(joining: Iterable[Groups], devices: int) -> int:
    """The largest number of devices that groups connect.

    Groups over two mesh axes connect the devices of both.

    >>> joined_devices([((0, 1), (2, 3)), ((0, 2), (1, 3))], 8)
    4
    """
    return max(Counter(_leaders(joining, devices)).values())


@functools.lru_cache
def shards(
    pieces: tuple[int, ...],
    joining: Collection[Groups],
    gathering: Collection[Groups],
    data: tuple[Hashable, ...],
) -> int:
    """The number of shards of a parameter: the devices with a copy of it and different data.

    These devices hold the same piece, or gather each other's pieces. Devices over which a layer is
    split, and which process the same data, are one shard.

    Args:
      pieces: for each device, the piece of the parameter that it holds.
      joining: the groups of the collectives between the parameter and its new value.
      gathering: the groups over which its pieces are gathered.
      data: for each device, its data.

    >>> eight = ((0, 1, 2, 3, 4, 5, 6, 7),)
    >>> shards((0, 1) * 4, (eight,), (), data=(0, 0, 1, 1, 2, 2, 3, 3))
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
    """For each device, the representative of its connected devices."""
    leader = list(range(devices))

    def lead(device: int) -> int:
        while leader[device] != device:
            leader[device] = leader[leader[device]]
            device = leader[device]
        return device

    for groups in joining:
        for first, *rest in groups:
            for device in rest:
                leader[lead(device)] = lead(first)
    return [lead(device) for device in range(devices)]
