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

_UNLESS_MEANT = "Unset it, unless that is meant."
_READS_ALL = f"each step waits for its results and reads them all. {_UNLESS_MEANT}"
# JAX's options that have a price, which their user may have forgotten.
_PRICES = {
    "jax_enable_x64": (
        f"arrays are float64 by default: twice the memory and bytes sent. {_UNLESS_MEANT}"
    ),
    "jax_debug_nans": _READS_ALL,
    "jax_debug_infs": _READS_ALL,
    "jax_check_tracer_leaks": (
        f"each traced function is traced slowly, and more than once. {_UNLESS_MEANT}"
    ),
    "jax_default_matmul_precision": (
        "it holds for every matrix product of the program. Unset it, and pass precision= where it "
        "matters."
    ),
}
# For GPUs: a variable, what it is set to, the kind of the note, and what it does.
_GPU_MEMORY = (
    (
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        ("false", "0"),
        "preallocate",
        "memory is taken piece by piece, and may be too scattered for a large array. Unset it, "
        "unless programs share the GPU.",
    ),
    (
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        ("platform",),
        "allocator",
        "each array is allocated by CUDA itself, which is slow. Unset it.",
    ),
)


def shown() -> dict[str, str]:
    """The variables that JAX, XLA and crossshard read."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SHOWN)}


def notes(devices: Devices | None) -> Iterator[Finding]:
    """What is right for some, and slow."""
    for name, price in _PRICES.items():
        value = getattr(_config, name, None)
        if value not in (None, False, "default"):
            yield Finding(name, f"{_given(name, value)}: {price}")
    if devices is None:
        return
    for name, values, kind, price in _GPU_MEMORY if devices.platform == "gpu" else ():
        given = os.environ.get(name, "")
        if given.lower() in values:
            yield Finding(kind, f"{name}={given}: {price}")
    is_of_cpus = devices.platform == "cpu" and devices.processes > 1
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if is_of_cpus and sys.platform == "linux" and "malloc.arena_max" not in tunables:
        yield Finding(
            "glibc",
            "GLIBC_TUNABLES is not set: XLA takes fresh memory in each step, which Linux hands out "
            f"in pages of 4 KiB. Set GLIBC_TUNABLES={TUNABLES} before Python starts, as crossshard "
            "launch does.",
        )


def findings() -> list[Finding]:
    """What is wrong whatever the devices are."""
    if not _config.jax_disable_jit:
        return []
    given = _given("jax_disable_jit", True)
    sentence = f"{given}: nothing is compiled, and each operation runs by itself. Unset it."
    return [Finding("jax_disable_jit", sentence)]


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
        what = f"XLA does not know {refused[1].strip()} of XLA_FLAGS. Take it out."
    elif "Could not open file" in started.stderr:
        what = (
            f"XLA_FLAGS={flags} does not start with --, so XLA takes it for the name of a file "
            f"that is not there. Write XLA_FLAGS=--{flags}."
        )
    else:
        return []
    return [Finding("XLA_FLAGS", what)]


def findings_about_devices(devices: Devices) -> list[Finding]:
    """What contradicts the devices that JAX has found."""
    asked = dict(_asked_cpu_devices())
    what = f"{' and '.join(f'{name} says {n}' for name, n in asked.items())} virtual CPU devices"
    if len(set(asked.values())) > 1:
        why = f", and this process has {devices.local} {devices.platform}. Set one of the two."
    elif asked and devices.platform != "cpu":
        why = (
            f", but JAX uses {devices.platform}. Set JAX_PLATFORMS=cpu to train on them, or unset "
            "it."
        )
    elif asked and devices.local not in asked.values():
        why = (
            f", but JAX has made {devices.local}: it was set after the first JAX operation. Set it "
            "before, or call crossshard.cpu_devices before."
        )
    else:
        return []
    return [Finding("virtual devices", what + why)]


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


def _given(name: str, value: object) -> str:
    """``JAX_DEBUG_NANS=1``, or ``jax_debug_nans=True`` if a program has set it."""
    variable = name.upper()
    given = os.environ.get(variable)
    return f"{name}={value}" if given is None else f"{variable}={given}"
