"""The compiler options with which a step's communication hides behind its computation."""

import contextlib
import os
import re
from pathlib import Path

# The bytes of gradients that XLA combines into one collective. This is its own default for
# all-reduces.
_COMBINED = 30 << 20
# The GPUs of most hosts.
_OF_A_HOST = 8


def compiler_options(
    platform: str, shards: int, *, in_parts: bool = False, beside: bool = False
) -> dict[str, bool | int]:
    """The options for a step on these devices, without those that the user has set in XLA_FLAGS.

    XLA for GPUs combines reduce-scatters until their *outputs*, of which each shard has 1/N, have
    30 MB. Most models are smaller than N times that, so their gradients would be one reduce-scatter
    after the whole backward pass. Measured on gradients, as for all-reduces, it takes place beside
    the matrix products of the layers that are left. The scheduler that puts it there is on for the
    H100, and off for the A100.

    Args:
      platform: of the devices, as ``device.platform``.
      shards: the number of shards that reduce together.
      in_parts: whether parameters are gathered, too.
      beside: whether a stage communicates beside that, too.

    >>> compiler_options("cpu", 8)
    {}
    >>> compiler_options("gpu", 8)["xla_gpu_reduce_scatter_combine_threshold_bytes"]
    3932160
    """
    if platform != "gpu" or (shards == 1 and not beside):
        return {}
    options: dict[str, bool | int] = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _COMBINED // shards,
    }
    if in_parts and shards > _OF_A_HOST:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 3
    if beside:
        # Else its collectives and those of the gradients would wait for each other.
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2
    flags = _users_flags()
    return {name: value for name, value in options.items() if name not in flags}


def _users_flags() -> set[str]:
    """The names of the options in XLA_FLAGS, or in the file that it names."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        with contextlib.suppress(OSError):
            text = Path(text).read_text(encoding="utf-8")
    return set(re.findall(r"(?:^|\s)--(\w+)", text))
