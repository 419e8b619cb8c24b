"""The lower bound of an update's time: the bytes it must move over the measured bandwidth."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_FLOAT32_BYTES = 4
# Per thread; much larger than any cache.
_COPIED_BYTES = 128 * 2**20
_COPIES = 12


def least_bytes(parameters: int, shards: int) -> int:
    """The bytes that AdamW over shards on one machine must move, however it is done.

    Every shard's gradients are read (N·P), the parameters and the two moments are read once (3·P),
    the moments are written once (2·P) and the new parameters into every shard's copy (N·P):
    (2·N + 5)·P values of four bytes. Neither a sum kept in registers nor reading a cache line in
    order to overwrite it counts.
    """
    return (2 * shards + 5) * parameters * _FLOAT32_BYTES


def measure_bandwidth() -> float:
    """Bytes a second, read and written, of the best of several large copies on all cores."""
    threads = cores()
    sources = [np.ones(_COPIED_BYTES // 8) for _ in range(threads)]
    targets = [np.zeros(_COPIED_BYTES // 8) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_COPIES):
            began = time.perf_counter()
            # NumPy releases the GIL while it copies.
            list(pool.map(np.copyto, targets, sources))
            best = min(best, time.perf_counter() - began)
    return 2 * threads * _COPIED_BYTES / best


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
