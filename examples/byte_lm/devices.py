"""The devices of a training run: virtual CPU devices, or all of an accelerator's."""

import math
import os
import re

import jax

from crossshard import cpu_devices
from crossshard.errors import ArgumentError
from examples.byte_lm.groups import MOST_SHARDS, Groups

CPU_SHARDS = 8
# What as many shards as there can be are served by.
_MOST_THREADS = 4 * MOST_SHARDS


def start_shards(
    asked: int | None, groups: Groups | None, model_shards: int = 1, processes: int = 1
) -> int:
    """Start JAX's devices and return the number of shards.

    Args:
      asked: how many the user wants; ``None`` for what the groups, or else the devices, suggest.
      groups: the groups to cover, if any.
      model_shards: the devices of each shard.
      processes: how many there are; each has as many of the devices.

    Raises:
      ArgumentError: more shards than possible, or processes without one.
    """
    if asked is None and groups is not None:
        asked = groups.shards
    on_cpu = asked or _shards_on_cpu(model_shards, processes)
    of_devices = f" of {model_shards} devices" * (model_shards > 1)
    if on_cpu * model_shards > MOST_SHARDS * processes:
        raise ArgumentError(
            f"{on_cpu} shards{of_devices} are more than one process can run; use at most "
            f"{MOST_SHARDS} devices."
        )
    if on_cpu * model_shards % processes:
        raise ArgumentError(
            f"{on_cpu} shards{of_devices} cannot be split evenly over {processes} processes. Pass "
            f"--shards {math.lcm(processes, on_cpu)}, or start another number of processes."
        )
    _check_threads()
    # Whether there is an accelerator shows only once JAX runs, and then it is too late to make
    # CPU devices. Where there is one these stay idle.
    cpu_devices(on_cpu * model_shards // processes)
    try:
        devices = jax.devices()
    except Exception as error:  # JAX lets through what its plugins raise
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise ArgumentError(
            f"JAX cannot start on the devices that JAX_PLATFORMS={wanted} asks for "
            f"({type(error).__name__} {error}). Set JAX_PLATFORMS=cpu, or leave it out."
        ) from None
    platform = devices[0].platform
    most = len(devices) // model_shards
    shards = on_cpu if asked or platform == "cpu" else max(1, most)
    if shards > most:
        raise ArgumentError(
            f"{shards} shards{of_devices} need {shards * model_shards} devices, and there are "
            f"{len(devices)} ({platform}). Use at most {len(devices)} devices, or set "
            f"JAX_PLATFORMS=cpu for virtual ones."
        )
    if processes > 1 and shards * model_shards < len(devices):
        raise ArgumentError(
            f"{shards} shards{of_devices} leave {len(devices) - shards * model_shards} of the "
            f"{len(devices)} devices of these {processes} processes without work. Leave --shards "
            f"out."
        )
    return shards


def _shards_on_cpu(model_shards: int, processes: int) -> int:
    """As many as the launcher has asked for, or those of eight devices or a few more."""
    given = int(os.environ.get("JAX_NUM_CPU_DEVICES") or 0)
    devices = given * processes if given > 0 else math.ceil(CPU_SHARDS / processes) * processes
    return max(1, devices // model_shards)


def _check_threads() -> None:
    """Raise if NPROC, which XLA takes for the number of processors, is not one."""
    given = os.environ.get("NPROC", "")
    # Not isdigit, for which ² is a digit.
    number = int(given) if re.fullmatch("[0-9]{1,9}", given) else 0
    if given and not 1 <= number <= _MOST_THREADS:
        raise ArgumentError(
            f"NPROC, from which XLA takes its number of threads, must be from 1 to "
            f"{_MOST_THREADS}; it is {given!r}. Leave it out."
        )
