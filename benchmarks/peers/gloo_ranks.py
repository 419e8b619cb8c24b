"""A rank of PyTorch's gloo: joins the others, has AdamW, and takes the steps it is asked for."""

import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch.distributed.optim import (  # type: ignore[import-not-found]
    ZeroRedundancyOptimizer,
)


def answer(
    rank: int,
    ranks: int,
    cores: int,
    folder: str,
    asked: Connection,
    make: Callable[[str], Any],
) -> None:
    """Be one rank: sleep until a question comes, answer it, leave at ``None``.

    Args:
      rank: its number.
      ranks: how many there are.
      cores: how many cores they share.
      folder: where they meet.
      asked: the pipe to the questions.
      make: makes the candidate of a name, with ``step()`` and ``sample()``.
    """
    torch.set_num_threads(max(1, cores // ranks))
    # A file for a meeting place and the loopback for messages: nothing listens to the outside.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks
    )
    candidates: dict[str, Any] = {}
    while (question := asked.recv()) is not None:
        variant = question["variant"]
        if variant not in candidates:
            candidates[variant] = make(variant)
        candidate = candidates[variant]
        dist.barrier()
        began = time.perf_counter()
        for _ in range(question["steps"]):
            candidate.step()
        dist.barrier()
        seconds = time.perf_counter() - began
        asked.send({"seconds": seconds, "sample": candidate.sample()})
    dist.destroy_process_group()


def adamw(params: list, problem: dict, *, sharded: bool) -> Any:
    """PyTorch's fastest AdamW; with ZeRO, each rank updates a part and broadcasts it."""
    numbers = {
        "lr": problem["learning_rate"],
        "betas": (problem["b1"], problem["b2"]),
        "eps": problem["eps"],
        "weight_decay": problem["weight_decay"],
        "fused": True,
    }
    if not sharded:
        return torch.optim.AdamW(params, **numbers)
    return ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, parameters_as_bucket_view=True, **numbers
    )


def last_numbers(params: list) -> list[float]:
    """The last number of every array."""
    return [param.flatten()[-1].item() for param in params]
