"""Settings: environment variables and JAX's configuration that slow a run down, or break it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax

from crossshard import _jax
from crossshard.distributed.job import TUNABLES
from crossshard.shards.devices import forced_cpu_devices
from crossshard.tools.diagnosis.report import Devices, Finding

# Its stubs lack most options.
_config: Any = jax.config

_SHOWN = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "CUDA_VISIBLE", "GLIBC_TUNABLES", "NPROC")

# What has a price that its user may have forgotten.
_PRICES = (
    ("jax_enable_x64", "arrays are float64 by default: twice the memory and bytes sent"),
    ("jax_debug_nans", "each step waits for its results and reads them all"),
    ("jax_debug_infs", "each step waits for its results and reads them all"),
    ("jax_check_tracer_leaks", "each traced function is traced slowly, and more than once"),
)


def shown() -> dict[str, str]:
    """The variables that JAX, XLA and crossshard read."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SHOWN)}


def notes(devices: Devices | None) -> Iterator[Finding]:
    """What is right for some, and slow."""
    for name, price in _PRICES:
        if getattr(_config, name, False):
            yield Finding(name, f"{_given(name, True)}: {price}. Unset it, unless that is meant.")
    precision = _config.jax_default_matmul_precision
    if precision not in (None, "default"):
        yield Finding(
            "jax_default_matmul_precision",
            f"{_given('jax_default_matmul_precision', precision)} holds for every matrix product "
            f"of the program. Unset it, and pass precision= where it matters.",
        )
    if devices is None:
        return
    yield from _of_gpu_memory(devices)
    is_of_cpus = devices.platform == "cpu" and devices.processes > 1
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if is_of_cpus and sys.platform == "linux" and "malloc.arena_max" not in tunables:
        yield Finding(
            "glibc",
            "GLIBC_TUNABLES is not set: XLA takes fresh memory in each step, which Linux hands out "
            f"in pages of 4 KiB. Set GLIBC_TUNABLES={TUNABLES} before Python starts, as crossshard "
            "launch does.",
        )


def findings() -> Iterator[Finding]:
    """What is wrong whatever the devices are."""
    if _config.jax_disable_jit:
        yield Finding(
            "jax_disable_jit",
            f"{_given('jax_disable_jit', True)}: nothing is compiled, and each operation runs by "
            f"itself. Unset it.",
        )


def refused_flags() -> list[Finding]:
    """``XLA_FLAGS`` that XLA does not know: it ends the process as soon as JAX starts."""
    flags = os.environ.get("XLA_FLAGS")
    if not flags or _jax.backend_is_running():
        return []
    # In a process of its own, which may end.
    started = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    refused = re.search(r"Unknown flags? in XLA_FLAGS: *(.+)", started.stderr)
    if refused:
        what = refused[1].strip()
        return [Finding("XLA_FLAGS", f"XLA does not know {what} of XLA_FLAGS. Take it out.")]
    if "Could not open file" in started.stderr:
        return [
            Finding(
                "XLA_FLAGS",
                f"XLA_FLAGS={flags} does not start with --, so XLA takes it for the name of a file "
                f"that is not there. Write XLA_FLAGS=--{flags}.",
            )
        ]
    return []


def findings_about_devices(devices: Devices) -> Iterator[Finding]:
    """What contradicts the devices that JAX has found."""
    asked = dict(_asked_cpu_devices())
    if not asked:
        return
    words = " and ".join(f"{name} says {number}" for name, number in asked.items())
    if len(set(asked.values())) > 1:
        yield Finding(
            "virtual devices",
            f"{words} virtual CPU devices, and this process has {devices.local} "
            f"{devices.platform}. Set one of the two.",
        )
    elif devices.platform != "cpu":
        yield Finding(
            "virtual devices",
            f"{words} virtual CPU devices, but JAX uses {devices.platform}. Set "
            f"JAX_PLATFORMS=cpu to train on them, or unset it.",
        )
    elif devices.local not in asked.values():
        yield Finding(
            "virtual devices",
            f"{words} virtual CPU devices, but JAX has made {devices.local}: it was set after the "
            f"first JAX operation. Set it before, or call crossshard.cpu_devices before.",
        )


def asks_for_cpus() -> bool:
    """Whether virtual CPU devices are asked for."""
    return bool(dict(_asked_cpu_devices()))


def _asked_cpu_devices() -> Iterator[tuple[str, int]]:
    """What asks for virtual CPU devices, and for how many."""
    forced = forced_cpu_devices()
    if forced is not None:
        yield "--xla_force_host_platform_device_count in XLA_FLAGS", forced
    given = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    if given.isdecimal():
        yield "JAX_NUM_CPU_DEVICES", int(given)
    elif _config.jax_num_cpu_devices > 0:
        yield "jax_num_cpu_devices", _config.jax_num_cpu_devices


def _of_gpu_memory(devices: Devices) -> Iterator[Finding]:
    if devices.platform != "gpu":
        return
    preallocate = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    if preallocate.lower() in ("false", "0"):
        yield Finding(
            "preallocate",
            f"XLA_PYTHON_CLIENT_PREALLOCATE={preallocate}: memory is taken piece by piece, and may "
            f"be too scattered for a large array. Unset it, unless programs share the GPU.",
        )
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        yield Finding(
            "allocator",
            "XLA_PYTHON_CLIENT_ALLOCATOR=platform: each array is allocated by CUDA itself, which "
            "is slow. Unset it.",
        )


def _given(name: str, value: object) -> str:
    """``JAX_DEBUG_NANS=1``, or ``jax_debug_nans=True`` if a program has set it."""
    variable = name.upper()
    given = os.environ.get(variable)
    return f"{name}={value}" if given is None else f"{variable}={given}"
