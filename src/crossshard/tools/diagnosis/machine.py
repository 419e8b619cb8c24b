"""Machine: the devices that JAX finds here, and those that it leaves unused."""

import collections
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from crossshard.errors import DeadlockWarning
from crossshard.shards.devices import shard_mesh, warn_of_deadlock
from crossshard.tools.diagnosis.report import Devices, Finding
from crossshard.tools.diagnosis.settings import asks_for_cpus

_DEV = Path("/dev")
_SHM = "/dev/shm"
# Docker gives 64 MB, which NCCL fills with the buffers of a few GPUs.
_LEAST_SHM = 2**30
# The extra of JAX that brings the plugin for a platform, and its modules.
_PLUGINS = {
    "cuda": ("cuda12", "jax_cuda12_plugin", "jax_cuda13_plugin"),
    "tpu": ("tpu", "libtpu"),
}


def look() -> Devices:
    """Start JAX, and look at the devices that it finds."""
    everyone, own = jax.devices(), jax.local_devices()
    return Devices(
        own[0].platform,
        own[0].device_kind,
        len(everyone),
        len(own),
        jax.process_count(),
        jax.process_index(),
        _memory(own[0]),
    )


def why_jax_does_not_start(error: BaseException) -> str:
    """A sentence on an exception that JAX raises in place of its devices."""
    config: Any = jax.config
    given = config.jax_platforms or ""
    first = (str(error).splitlines() or [""])[0].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    if not given:
        return f"JAX does not start: {first or type(error).__name__:.300}."
    # JAX may fail without a word where a plugin is not installed.
    missing = [extra for name, (extra, *_) in _PLUGINS.items() if name in given and not _has(name)]
    hint = f'Install it, pip install "jax[{missing[0]}]", or unset' if missing else "Unset"
    why = f": {first:.300}" if first else ""
    return f"JAX_PLATFORMS={given}, but JAX has no such devices here{why}. {hint} JAX_PLATFORMS."


def findings(devices: Devices) -> Iterator[Finding]:
    """What is wrong with the devices."""
    if devices.platform == "cpu":
        yield from _of_unused_accelerators()
        yield from _of_threads(devices)
    if devices.platform == "gpu":
        yield from _of_shared_memory(devices)
    yield from _of_kinds(jax.devices())


def _of_unused_accelerators() -> Iterator[Finding]:
    if asks_for_cpus():
        return
    for name, files in (("cuda", "nvidia[0-9]*"), ("tpu", "accel[0-9]*")):
        there = sorted(_DEV.glob(files))
        if not there:
            continue
        what = f"There is {there[0]}, but JAX uses the CPU: "
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if platforms and name not in platforms and "gpu" not in platforms:
            why = f"JAX_PLATFORMS={platforms}. Unset it, or set JAX_PLATFORMS={name}."
        elif name == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
            given = os.environ["CUDA_VISIBLE_DEVICES"]
            why = f"CUDA_VISIBLE_DEVICES={given!r} hides it. Unset it."
        elif not _has(name):
            why = (
                f'the plugin is missing. pip install "jax[{_PLUGINS[name][0]}]=={jax.__version__}".'
            )
        else:
            why = f"the plugin failed. JAX_PLATFORMS={name} crossshard doctor says why."
        yield Finding("unused accelerator", what + why)


def _has(platform: str) -> bool:
    """Whether the plugin for a platform is installed."""
    _, *modules = _PLUGINS[platform]
    return any(importlib.util.find_spec(each) is not None for each in modules)


def _of_threads(devices: Devices) -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeadlockWarning)
        warn_of_deadlock(shard_mesh(devices.number))
    sentences = {str(each.message) for each in caught if each.category is DeadlockWarning}
    yield from (Finding("threads", sentence) for sentence in sentences)


def _of_shared_memory(devices: Devices) -> Iterator[Finding]:
    if devices.local == 1 or not os.path.isdir(_SHM):
        return
    found = os.statvfs(_SHM)
    if found.f_blocks * found.f_frsize < _LEAST_SHM:
        yield Finding(
            "shared memory",
            f"{_SHM} has {found.f_blocks * found.f_frsize / 2**20:.0f} MiB, which NCCL may fill "
            f"between GPUs. Start the container with --shm-size=1g, or more.",
        )


def _of_kinds(devices: Sequence[Any]) -> Iterator[Finding]:
    kinds = sorted({each.device_kind for each in devices})
    if len(kinds) > 1:
        yield Finding(
            "mixed devices",
            f"The devices are of several kinds, {', '.join(kinds)}: the slowest sets the pace. "
            f"Train on one kind, with a mesh of those devices.",
        )
    own = collections.Counter(each.process_index for each in devices)
    if len(set(own.values())) > 1:
        fewest = min(own, key=own.__getitem__)
        yield Finding(
            "uneven processes",
            f"Process {fewest} has {own[fewest]} devices and another has {max(own.values())}. Give "
            f"each as many, or its rows of a batch are of another number.",
        )


def _memory(device: Any) -> int | None:
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (device.memory_stats() or {}).get("bytes_limit")
