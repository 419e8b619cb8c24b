"""Topologies by name: TPU slices, GPU clusters, this machine; what compilers are told of them."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from crossshard import _check
from crossshard.errors import ArgumentError
from crossshard.shards.devices import cpu_devices
from crossshard.tools.quiet import quiet

_GIB = 2**30

# What libtpu's compiler lets a program have on a chip, in bytes, and the dimensions of the torus.
TPUS = {
    "v5e": (int(15.75 * _GIB), 2),
    "v5p": (int(95.74 * _GIB), 3),
    "v6e": (int(31.25 * _GIB), 2),
}
# What libtpu reads when it is loaded, unless the user has set it.
_OF_LIBTPU = {
    # There is no TPU here, nor a server that could tell which one.
    "TPU_SKIP_MDS_QUERY": "1",
    # Nothing is run, so two processes may compile at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as XLA describes it; ``memory`` is in bytes."""

    name: str
    memory: int
    capability: int
    cores: int
    fpus: int
    clock: float
    shared: int
    cache: int
    bandwidth: int
    dnn: tuple[int, int]

    def target(self) -> str:
        """The description for the compiler: a ``GpuTargetConfigProto`` of XLA, as text.

        >>> "core_count: 132" in GPUS["h100"].target()
        True
        """
        return f"""
gpu_device_info {{
  name: "{self.name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {self.capability} }}
  core_count: {self.cores}
  fpus_per_core: {self.fpus}
  clock_rate_ghz: {self.clock}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared - 1024}
  shared_memory_per_core: {self.shared}
  l2_cache_size: {self.cache}
  memory_bandwidth: {self.bandwidth}
  device_memory_size: {self.memory}
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "{self.dnn[0]}.{self.dnn[1]}.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {self.dnn[0]} minor: {self.dnn[1]} }}
device_description_str: "{self.name}"
"""


# From xla/backends/gpu/target_config/specs/*.txtpb in github.com/openxla/xla (Apache-2.0).
GPUS = {
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", 85100068864, 8, 108, 64, 1.41),
        *(167936, 41943040, 2039040000000, (8, 9)),
    ),
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", 84942979072, 9, 132, 128, 1.98),
        *(233472, 52428800, 3352320000000, (9, 10)),
    ),
    "h200": Gpu(
        *("NVIDIA H200 141GB HBM3e", 151397597184, 9, 132, 128, 1.98),
        *(233472, 52428800, 4800000000000, (9, 10)),
    ),
    "b200": Gpu(
        *("NVIDIA B200", 191514411008, 10, 148, 128, 1.965),
        *(233472, 132644864, 7672320000000, (9, 7)),
    ),
}

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
      memory: the bytes of a device that a program may use; of the CPU devices of this machine, each
        has its part.
      devices: in the order of the machine.
    """

    name: str
    memory: int
    devices: Sequence[jax.Device]

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def kind(self) -> str:
        """``"v5e"``, ``"h100"``, ``"cpu"`` …: the name of a device."""
        return self.name.partition(":")[0]

    def mesh(self, shape: dict[str, int]) -> Mesh:
        """A mesh with these axes, neighbours next to each other."""
        sizes, names = tuple(shape.values()), tuple(shape)
        types = (AxisType.Auto,) * len(names)
        if self.kind not in TPUS:
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
    return _tpu(name, kind, sizes) if kind in TPUS else _gpu(name, kind, sizes)


def _cpu(name: str, sizes: list[int]) -> Topology:
    if len(sizes) != 1:
        raise ArgumentError(f"CPU devices have one number, as in cpu:8; got {name!r}.")
    cpu_devices(sizes[0])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Topology(name, memory // sizes[0], jax.devices("cpu")[: sizes[0]])


def _tpu(name: str, kind: str, sizes: list[int]) -> Topology:
    memory, dimensions = TPUS[kind]
    if importlib.util.find_spec("libtpu") is None:
        raise ArgumentError(
            f'{name} needs libtpu, which compiles for TPUs: pip install "crossshard[tpu]".'
        )
    if len(sizes) != dimensions:
        example = "x".join(["4"] * dimensions)
        raise ArgumentError(
            f"{kind} has {dimensions} dimensions, as in {kind}:{example}; got {name!r}. Known are "
            f"{KNOWN}."
        )
    for setting, value in _OF_LIBTPU.items():
        os.environ.setdefault(setting, value)
    # Hosts have four chips or eight, except those with a single one.
    hosts = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(sizes) == 1 else {}
    return _described(name, memory, platform="tpu", topology_name=name, **hosts)


def _gpu(name: str, kind: str, sizes: list[int]) -> Topology:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if all(importlib.util.find_spec(each) is None for each in plugins):
        raise ArgumentError(
            f'{name} needs JAX for CUDA, which compiles for GPUs: pip install "crossshard[cuda12]".'
        )
    if len(sizes) != 2:
        raise ArgumentError(f"A cluster is hosts x GPUs of a host, as in {kind}:4x8; got {name!r}.")
    # There is no GPU here to be compatible with.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    return _described(
        name,
        GPUS[kind].memory,
        platform="cuda",
        topology_name=kind,
        topology=f"1x{sizes[0]}x{sizes[1]}",
        target_config=GPUS[kind].target(),
    )


def _described(name: str, memory: int, **description: Any) -> Topology:
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
    return Topology(name, memory, found.devices)
