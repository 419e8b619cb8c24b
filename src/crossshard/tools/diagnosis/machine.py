"""Machine: versions, settings, and the devices that JAX finds here or leaves unused."""

import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

import crossshard
from crossshard.errors import DeadlockWarning
from crossshard.shards.devices import forced_cpu_devices, shard_mesh, warn_of_deadlock
from crossshard.tools.diagnosis.report import Devices, Finding

_DEV = Path("/dev")
# They must be of the version of jaxlib, or JAX leaves them aside.
_PLUGINS = (
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("jax-rocm7-plugin", "jax-rocm7-pjrt"),
)
_SHOWN = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "libtpu", *_PLUGINS)
_SETTINGS = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "CUDA_VISIBLE", "GLIBC_TUNABLES", "NPROC")


def installed() -> dict[str, str]:
    """The versions of Python, crossshard and what it runs on."""
    found = {name: version for name in _SHOWN if (version := _version(name))}
    # What was imported, whatever else is installed.
    ours = {"crossshard": crossshard.__version__, "Python": platform.python_version()}
    return ours | found | {"jax": jax.__version__}


def settings() -> dict[str, str]:
    """The environment variables that JAX, XLA and crossshard read."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SETTINGS)}


def of_versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Which versions do not fit together.

    Args:
      versions: as ``installed`` returns them.
    """
    jaxlib = versions.get("jaxlib", "")
    if jaxlib and _numbers(jaxlib) != _numbers(versions["jax"]):
        yield Finding(
            "versions",
            f"jax is {versions['jax']} and jaxlib {jaxlib}; they are released together: "
            f'pip install "jax=={versions["jax"]}" "jaxlib=={versions["jax"]}".',
        )
    for name in _PLUGINS:
        if jaxlib and name in versions and _numbers(versions[name]) != _numbers(jaxlib):
            extra = name.split("-")[1]
            yield Finding(
                "versions",
                f"{name} is {versions[name]} and jaxlib {jaxlib}, so JAX does not use the "
                f'accelerator: pip install "jax[{extra}]=={versions["jax"]}".',
            )
    is_installed = _version("crossshard") is not None
    for line in (importlib.metadata.requires("crossshard") or []) if is_installed else []:
        found = re.fullmatch(r"([\w-]+)\s*\(?([<>=,.\d\s]+)\)?", line)
        if found and found[1] in versions and not _fits(versions[found[1]], found[2]):
            name, wanted = found.groups()
            yield Finding(
                "versions",
                f"{name} is {versions[name]}, and crossshard supports {wanted}: "
                f'pip install "{name}{wanted}".',
            )


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
    # JAX may fail without a word where a plugin is not installed.
    lines = str(error).splitlines() or ["it finds no devices"]
    first = lines[0].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    if not config.jax_platforms:
        return f"JAX does not start: {first:.300}."
    return (
        f"JAX does not start with JAX_PLATFORMS={config.jax_platforms}: {first:.300}. Unset it, or "
        f'install what is missing: pip install "jax[cuda12]" for GPUs, "jax[tpu]" for TPUs.'
    )


def of_cpus(devices: Devices) -> Iterator[Finding]:
    """What is wrong where JAX uses the CPU."""
    config: Any = jax.config
    if devices.platform != "cpu":
        return
    # Who asks for virtual CPU devices does not want the GPU.
    if forced_cpu_devices() is None and config.jax_num_cpu_devices < 1:
        for name, files in (("cuda", "nvidia[0-9]*"), ("tpu", "accel[0-9]*")):
            if there := sorted(_DEV.glob(files)):
                yield Finding(
                    "unused accelerator",
                    f"There is {there[0]}, but JAX uses the CPU. JAX_PLATFORMS={name} crossshard "
                    f"doctor says why.",
                )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeadlockWarning)
        warn_of_deadlock(shard_mesh(devices.number))
    sentences = {str(each.message) for each in caught if each.category is DeadlockWarning}
    yield from (Finding("threads", sentence) for sentence in sentences)


def _memory(device: Any) -> int | None:
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (device.memory_stats() or {}).get("bytes_limit")


def _fits(version: str, wanted: str) -> bool:
    """Whether a version is in a range of ``>=`` and ``<``.

    >>> _fits("0.10.2", "<0.13,>=0.10.0"), _fits("0.13.0", "<0.13,>=0.10.0")
    (True, False)
    """
    has = _numbers(version)
    return all(
        (has >= _numbers(bound)) == (sign == ">=")
        for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Three of them, so that 0.13 is 0.13.0; what follows, as in ``rc1``, is left out."""
    found = re.findall(r"\d+", re.split(r"[^\d.]", version)[0])
    return tuple(int(each) for each in (*found, 0, 0, 0)[:3])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
