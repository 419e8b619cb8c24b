"""How many bytes each kind of link carries, and for how long."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from crossshard.tools.inspection.collectives import Collective
from crossshard.tools.planning.chips import Chip

INSIDE_HOST, INSIDE_SLICE, ACROSS = "inside a host", "inside a slice", "across"


def bytes_by_link(each: Collective, devices: Sequence[Any]) -> dict[str, float]:
    """The bytes that a device sends over each kind of link, on average over the devices.

    The devices of a group form a ring, host after host, so that of n neighbours as many send to
    another host as there are hosts. In an all-to-all all send to all. GPUs of several hosts are
    ``"across"``, as are TPUs of several slices; TPUs of several hosts are ``"inside a slice"``.

    Args:
      each: the collective.
      devices: the devices of the program, in its order.
    """
    shares: dict[str, float] = {}
    pairs = 0
    for group in each.groups:
        for one, other in _pairs(each.kind, [devices[place] for place in group]):
            kind = link(one, other)
            shares[kind] = shares.get(kind, 0) + 1
            pairs += 1
    return {kind: each.bytes_sent * number / pairs for kind, number in shares.items()}


def link(one: Any, other: Any) -> str:
    """The kind of link between two devices."""
    if one.process_index == other.process_index:
        return INSIDE_HOST
    is_tpu = one.platform == "tpu"
    same_slice = getattr(one, "slice_index", None) == getattr(other, "slice_index", None)
    return INSIDE_SLICE if is_tpu and same_slice else ACROSS


def _pairs(kind: str, group: list[Any]) -> Iterable[tuple[Any, Any]]:
    if kind == "collective-permute":
        yield (group[0], group[1])
    elif "to-all" in kind and len(group) <= 64:
        yield from ((a, b) for a in group for b in group if a is not b)
    else:
        ring = sorted(group, key=lambda d: (getattr(d, "slice_index", None) or 0, d.process_index))
        yield from zip(ring, [*ring[1:], ring[0]], strict=True)


def seconds(each: Collective, devices: Sequence[Any], chip: Chip) -> float:
    """The time that a collective takes if every link is used at its published bandwidth."""
    sent = bytes_by_link(each, devices)
    across = sent.pop(ACROSS, 0) / chip.across
    inside = sum(sent.values())
    if chip.platform != "tpu":
        return max(across, inside / chip.inside)
    return max(across, inside / (chip.inside * _links_in_use(each, devices, chip)))


def _links_in_use(each: Collective, devices: Sequence[Any], chip: Chip) -> int:
    """The links that a group on a torus sends over at once: two along each ring, one on a line."""
    group = max(each.groups, key=len)
    places = np.array([devices[place].coords for place in group])
    whole = np.array([device.coords for device in devices])
    used = 0
    for along, of_all in zip(places.T, whole.T, strict=True):
        if (number := len(set(along.tolist()))) > 1:
            size = int(of_all.max()) + 1
            used += 2 if number == size and size % chip.torus == 0 else 1
    return max(used, 1)
