"""Which devices a training run uses: virtual ones of the CPU, or all that an accelerator has."""

import jax

from crossshard import cpu_devices
from crossshard.errors import ArgumentError
from examples.byte_lm.groups import MOST_SHARDS, Groups

CPU_SHARDS = 8


def start_shards(asked: int | None, groups: Groups | None) -> int:
    """Start JAX's devices and say how many shards there will be.

    Args:
      asked: how many the user wants; ``None`` for what the groups, or else the devices, suggest.
      groups: the groups to cover, if any.

    Raises:
      ArgumentError: more than there can be.
    """
    if asked is None and groups is not None:
        asked = groups.shards
    if asked is not None and asked > MOST_SHARDS:
        raise ArgumentError(
            f"{asked} shards are more than one process can serve; ask for at most {MOST_SHARDS}."
        )
    # Whether there is an accelerator shows only once JAX runs, and then it is too late to make
    # CPU devices. Where there is one these stay idle.
    cpu_devices(asked or CPU_SHARDS)
    devices = jax.devices()
    platform = devices[0].platform
    shards = asked or (CPU_SHARDS if platform == "cpu" else len(devices))
    if shards > len(devices):
        raise ArgumentError(
            f"{shards} shards need {shards} devices, and there are {len(devices)} ({platform}). "
            f"Ask for at most {len(devices)}, or set JAX_PLATFORMS=cpu for virtual ones."
        )
    return shards
