"""GPUs as XLA describes them to compile for, without one."""

import dataclasses

from crossshard.tools.planning.chips import GPUS


@dataclasses.dataclass(frozen=True)
class _Target:
    name: str
    capability: int
    cores: int
    fpus: int
    clock: float
    shared: int
    shared_optin: int
    cache: int
    bandwidth: int
    dnn: tuple[int, int]


# From xla/backends/gpu/target_config/specs/*.txtpb in github.com/openxla/xla (Apache-2.0).
_TARGETS = {
    "a100": _Target(
        *("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 167936, 166912, 41943040, 2039040000000),
        (8, 9),
    ),
    "h100": _Target(
        *("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 233472, 232448, 52428800, 3352320000000),
        (9, 10),
    ),
    "h200": _Target(
        *("NVIDIA H200 141GB HBM3e", 9, 132, 128, 1.98, 233472, 232448, 52428800, 4800000000000),
        (9, 10),
    ),
    "b200": _Target(
        *("NVIDIA B200", 10, 148, 128, 1.965, 233472, 232448, 132644864, 7672320000000),
        (9, 7),
    ),
}


def target(gpu: str) -> str:
    """The description of a GPU: a ``GpuTargetConfigProto`` of XLA, as text.

    >>> "core_count: 132" in target("h100")
    True
    """
    it = _TARGETS[gpu]
    return f"""
gpu_device_info {{
  name: "{it.name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {it.capability} }}
  core_count: {it.cores}
  fpus_per_core: {it.fpus}
  clock_rate_ghz: {it.clock}
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
  shared_memory_per_block_optin: {it.shared_optin}
  shared_memory_per_core: {it.shared}
  l2_cache_size: {it.cache}
  memory_bandwidth: {it.bandwidth}
  device_memory_size: {GPUS[gpu].memory}
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "{it.dnn[0]}.{it.dnn[1]}.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {it.dnn[0]} minor: {it.dnn[1]} }}
device_description_str: "{it.name}"
"""
