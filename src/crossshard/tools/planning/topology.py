"""Topologies by name: TPU slices, GPU clusters, and the CPU devices of this machine."""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from crossshard import _check
from crossshard.errors import ArgumentError
from crossshard.shards.devices import cpu_devices
from crossshard.tools.planning.chips import GPUS, TPUS, Chip
from crossshard.tools.planning.targets import target
from crossshard.tools.quiet import for_gpus, for_tpus, quiet

# The names of topologies, in words.
KNOWN = (
    "v5e:4x4 and v6e:8x8 (chips), v5p:4x4x4, "
    + ", ".join(f"{name}:4x8" for name in GPUS)
    + " (hosts x GPUs), cpu:8; in these forms with other numbers"
)
_MOST = 2**17


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices to compile for.

    Attributes:
      name: as it was given.
      chip: what they are; ``None`` for the CPU devices of this machine.
      devices: in the order of the machine.
    """

    name: str
    chip: Chip | None
    devices: Sequence[jax.Device]

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def mesh(self, shape: dict[str, int]) -> Mesh:
        """A mesh with these axes, neighbours next to each other."""
        sizes, names = tuple(shape.values()), tuple(shape)
        types = (AxisType.Auto,) * len(names)
        if self.chip is None or self.chip.platform == "gpu":
            # GPUs of a host follow each other, and all are alike.
            return Mesh(np.array(self.devices).reshape(sizes), names, axis_types=types)
        from jax.experimental import mesh_utils

        placed = mesh_utils.create_device_mesh(sizes, self.devices, allow_split_physical_axes=True)
        return Mesh(placed, names, axis_types=types)


def topology(name: str) -> Topology:
    """The topology of a name such as ``v5p:4x4x4``, ``h100:4x8`` or ``cpu:8``.

    Raises:
      ArgumentError: there is none of this name, or what compiles for it is not installed.

    >>> topology("cpu:1").size
    1
    """
    given = name if isinstance(name, str) else ""
    found = re.fullmatch(r"([a-z]\w*):(\d{1,6}(?:x\d{1,6})*)", given)
    kind, sizes = (found[1], [int(n) for n in found[2].split("x")]) if found else ("", [0])
    known = kind in TPUS or kind in GPUS or kind == "cpu"
    if not known or not 0 < math.prod(sizes) <= _MOST:
        raise ArgumentError(f"There is no topology {_check.shown(name)}. Known are {KNOWN}.")
    if kind == "cpu":
        return _cpu(name, sizes)
    return _tpu(name, sizes) if kind in TPUS else _gpu(name, sizes)


def _cpu(name: str, sizes: list[int]) -> Topology:
    if len(sizes) != 1:
        raise ArgumentError(f"CPU devices have one number, as in cpu:8; got {name!r}.")
    cpu_devices(sizes[0])
    return Topology(name, None, jax.devices("cpu")[: sizes[0]])


def _tpu(name: str, sizes: list[int]) -> Topology:
    chip = TPUS[name.partition(":")[0]]
    if importlib.util.find_spec("libtpu") is None:
        raise ArgumentError(
            f'{name} needs libtpu, which compiles for TPUs: pip install "crossshard[tpu]".'
        )
    if len(sizes) != chip.links // 2:
        example = "x".join(["4"] * (chip.links // 2))
        raise ArgumentError(
            f"{chip.name} has {chip.links // 2} dimensions, as in {chip.name}:{example}; got "
            f"{name!r}. Known are {KNOWN}."
        )
    for_tpus()
    # Hosts have four chips or eight, except those with a single one.
    hosts = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(sizes) == 1 else {}
    return _described(name, chip, platform="tpu", topology_name=name, **hosts)


def _gpu(name: str, sizes: list[int]) -> Topology:
    chip = GPUS[name.partition(":")[0]]
    if importlib.util.find_spec("jax_cuda12_plugin") is None and (
        importlib.util.find_spec("jax_cuda13_plugin") is None
    ):
        raise ArgumentError(
            f'{name} needs JAX for CUDA, which compiles for GPUs: pip install "crossshard[cuda12]".'
        )
    if len(sizes) != 2:
        raise ArgumentError(
            f"A cluster is hosts x GPUs of a host, as in {chip.name}:4x8; got {name!r}."
        )
    for_gpus()
    return _described(
        name,
        chip,
        platform="cuda",
        topology_name=chip.name,
        topology=f"1x{sizes[0]}x{sizes[1]}",
        target_config=target(chip.name),
    )


def _described(name: str, chip: Chip, **description: Any) -> Topology:
    # Here, since importing crossshard brings in nothing that JAX, Optax and Flax do not.
    from jax.experimental import topologies

    try:
        with quiet():
            found = topologies.get_topology_desc(**description)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ArgumentError(
            f"There is no topology {name!r}: {first:.200}. Known are {KNOWN}."
        ) from error
    return Topology(name, chip, found.devices)
