"""Hosts: which parts of an array each host of a mesh holds, and what the hosts send each other."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec, Sharding

# Where the elements of a part begin and end, along each axis of its array.
Bounds = tuple[tuple[int, int], ...]


class Hosts:
    """The hosts of a mesh in a ring, and what they send each other.

    Attributes:
      mesh: the mesh.
      here: the processes of this host, and ``own`` its place in the ring.
      processes: the processes of all hosts.
      numbers: how many devices each host has.
    """

    def __init__(self, mesh: Mesh, of_host: tuple[tuple[int, ...], ...]):
        self.mesh, self._of_host = mesh, of_host
        self.here = next(each for each in of_host if jax.process_index() in each)
        self.own = of_host.index(self.here)
        flat: list[Any] = list(mesh.devices.flat)
        # The places of the devices of each host in the mesh.
        self._places = [
            [place for place, device in enumerate(flat) if device.process_index in own]
            for own in of_host
        ]
        self.processes = [process for own in of_host for process in own]
        self.numbers = [len(own) for own in self._places]

    def __len__(self) -> int:
        return len(self._of_host)

    @property
    def are_alike(self) -> bool:
        """Whether all hosts have equally many devices."""
        return len(set(self.numbers)) == 1

    def processes_after(self, distance: int) -> tuple[int, ...]:
        """Return the processes of the host so many places after this one."""
        return self._of_host[(self.own + distance) % len(self)]

    def devices_after(self, distance: int) -> dict[Any, Any]:
        """Return, for each device, the one in its place on the host so many places after its."""
        flat = self.mesh.devices.flat
        return {flat[to]: flat[source] for source, to in self._pairs(distance)}

    def have_all(self, x: jax.Array) -> bool:
        """Return whether each host has all elements of an array."""
        return all(
            sum(map(size_of, holders(x.sharding, x.shape, own))) == x.size for own in self._of_host
        )

    def _pairs(self, distance: int) -> list[tuple[int, int]]:
        """Return which device sends to which, so that each host sends so many places back."""
        return [
            pair
            for place, to in enumerate(self._places)
            for pair in zip(self._places[(place + distance) % len(self)], to, strict=True)
        ]

    def sent_back(self, arrays: list[jax.Array], distance: int) -> list[jax.Array]:
        """Return arrays of which each device has what that so many hosts after it had."""
        if not arrays:
            return []
        shardings: list[Any] = [x.sharding for x in arrays]
        specs = tuple(each.spec for each in shardings)
        return _sender(shardings[0].mesh, specs, tuple(self._pairs(distance)))(arrays)


# Cached, or each snapshot would trace it again.
@functools.lru_cache(maxsize=8)
def _sender(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], pairs: tuple[tuple[int, int], ...]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    def send(arrays: list[jax.Array]) -> list[jax.Array]:
        return [lax.ppermute(x, mesh.axis_names, pairs) for x in arrays]

    of_each = [*specs]
    return jax.jit(
        jax.shard_map(send, mesh=mesh, in_specs=(of_each,), out_specs=of_each, check_vma=False)
    )


def size_of(bounds: Bounds) -> int:
    """Return how many elements there are within bounds."""
    return math.prod(end - start for start, end in bounds)


def bounds_of(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
    """Return the bounds of a device's part, given as JAX tells it."""
    ranges = (along.indices(length) for along, length in zip(index, shape, strict=True))
    return tuple((start, end) for start, end, _ in ranges)


@functools.lru_cache(maxsize=4096)
def holders(
    sharding: Sharding, shape: tuple[int, ...], here: tuple[int, ...]
) -> dict[Bounds, list[Any]]:
    """Return the parts of an array that the processes of a host have, and the devices of each."""
    found: dict[Bounds, list[Any]] = {}
    placed: dict[Any, Any] = {**sharding.devices_indices_map(shape)}
    for device, index in placed.items():
        if device.process_index in here:
            found.setdefault(bounds_of(index, shape), []).append(device)
    return found


def own_pieces(
    x: jax.Array,
    of: jax.Array,
    here: tuple[int, ...],
    turn: int,
    after: Mapping[Any, Any] | None = None,
) -> Iterator[tuple[Bounds, jax.Array]]:
    """Yield what this process writes of ``x``: parts of ``of``, which ``after`` has had.

    Devices that have the same part take turns, so that each copies as much.
    """
    held = holders(of.sharding, of.shape, here)
    written = {devices[turn % len(devices)]: bounds for bounds, devices in held.items()}
    for shard in x.addressable_shards:
        device = shard.device if after is None else after[shard.device]
        if device in written:
            yield written[device], shard.data
