"""Published figures of accelerators, each with its source."""

import dataclasses
from collections.abc import Mapping

_TPUS = "https://docs.cloud.google.com/tpu/docs/"
_XLA = "xla/backends/gpu/target_config/specs/ in github.com/openxla/xla"


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator as its maker describes it.

    Attributes:
      name: as in the name of a topology.
      platform: ``"tpu"`` or ``"gpu"``.
      memory: bytes that a program may use.
      flops: peak FLOP/s of dense matrix products by dtype; ``"float32"`` stands for the others.
      memory_bandwidth: bytes/s.
      inside: bytes/s that a chip sends at once to chips of its slice (TPU) or host (GPU). For a
        TPU, of one of its links.
      links: of a TPU, two for each dimension of the torus; 1 for a GPU.
      across: bytes/s that a chip sends between slices or hosts, its part of the host's network.
      torus: the size of a dimension from which, in multiples, its ends are connected.
      source: where the figures stand.
    """

    name: str
    platform: str
    memory: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    inside: float
    links: int
    across: float
    torus: int
    source: str

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products of a dtype."""
        return self.flops.get(dtype, self.flops["float32"])


# XLA for TPUs multiplies float32 in bfloat16 unless asked for more precision.
def _tpu(bf16: float) -> dict[str, float]:
    return {"bfloat16": bf16, "float32": bf16}


def _gpu(sixteen: float, tf32: float, double: float) -> dict[str, float]:
    return {"bfloat16": sixteen, "float16": sixteen, "float32": tf32, "float64": double}


_GIB = 2**30

TPUS = {
    # ICI: half of the bidirectional bandwidth, over the links. The network: that of a pod over its
    # chips. Memory: what libtpu's compiler lets a program have.
    "v5e": Chip(
        "v5e", "tpu", int(15.75 * _GIB), _tpu(197e12), 819e9, 50e9, 4, 3.125e9, 16, _TPUS + "v5e"
    ),
    "v5p": Chip(
        "v5p", "tpu", int(95.74 * _GIB), _tpu(459e12), 2765e9, 100e9, 6, 6.25e9, 4, _TPUS + "v5p"
    ),
    "v6e": Chip(
        "v6e", "tpu", int(31.25 * _GIB), _tpu(918e12), 1600e9, 100e9, 4, 12.5e9, 16, _TPUS + "v6e"
    ),
}

GPUS = {
    # NVLink: half of the bidirectional bandwidth. The network: one InfiniBand port for each GPU, as
    # in NVIDIA's own DGX of that GPU. Dense, without sparsity; float32 as TF32, XLA's default.
    "a100": Chip(
        *("a100", "gpu", 85100068864, _gpu(312e12, 156e12, 19.5e12), 2039e9, 300e9, 1, 25e9, 0),
        f"NVIDIA A100 80GB SXM and DGX A100 data sheets; memory: {_XLA}",
    ),
    "h100": Chip(
        *("h100", "gpu", 84942979072, _gpu(989.4e12, 494.7e12, 67e12), 3350e9, 450e9, 1, 50e9, 0),
        f"NVIDIA H100 SXM and DGX H100 data sheets; memory: {_XLA}",
    ),
    "h200": Chip(
        *("h200", "gpu", 151397597184, _gpu(989.4e12, 494.7e12, 67e12), 4800e9, 450e9, 1, 50e9, 0),
        f"NVIDIA H200 SXM and DGX H200 data sheets; memory: {_XLA}",
    ),
    "b200": Chip(
        *("b200", "gpu", 191514411008, _gpu(2250e12, 1100e12, 40e12), 8000e9, 900e9, 1, 50e9, 0),
        f"NVIDIA HGX B200 and DGX B200 data sheets; memory: {_XLA}",
    ),
}

# The names that JAX has for their devices, ``device_kind``. Others of the same family, such as the
# H100 for PCIe, have other links.
_KINDS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA H200 141GB HBM3e": "h200",
    "NVIDIA B200": "b200",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device, by the name that JAX has for it; ``None`` if its figures are not here.

    >>> chip_of("TPU v5 lite").name, chip_of("cpu")
    ('v5e', None)
    """
    name = _KINDS.get(device_kind)
    return None if name is None else {**TPUS, **GPUS}[name]
