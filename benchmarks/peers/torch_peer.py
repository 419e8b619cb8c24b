"""PyTorch's part in the benchmarks: AdamW over gloo ranks on this machine, each a process.

Run by an interpreter that has torch, so it imports nothing of crossshard; what is said to it and
what it answers is told in ../peer.py. The gradients of each rank are given, laid out as in a
DistributedDataParallel with gradient_as_bucket_view: in buckets of 25 MiB that are reduced as they
are, without a copy, all under way at once.
"""

import json
import sys
from multiprocessing.connection import Connection

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from gloo_ranks import (  # type: ignore[import-not-found]
    adamw,
    answer,
    last_numbers,
)
from ranks import serve  # type: ignore[import-not-found]

_BUCKET_NUMBERS = 25 * 2**20 // 4


class Replica:
    """One rank's parameters and gradients, with an optimizer that is stepped after an all-reduce.

    Args:
      problem: shapes, scales of the gradients and numbers of the optimizer.
      rank: whose gradients to take.
      sharded: whether each rank updates a part of the parameters and broadcasts it.
    """

    def __init__(self, problem: dict, rank: int, sharded: bool) -> None:
        self._ranks = len(problem["scales"])
        self._params = [torch.ones(shape).requires_grad_() for shape in problem["shapes"]]
        self._buckets = _buckets(self._params)
        for param, scale in zip(self._params, problem["scales"][rank], strict=True):
            param.grad.copy_(scale * torch.linspace(-1, 1, param.numel()).view(param.shape))
        self._optimizer = adamw(self._params, problem, sharded=sharded)

    def step(self) -> None:
        """Reduce and update. The mean stays in the buckets, so the next one is of equal parts."""
        pending = [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]
        for bucket, work in zip(self._buckets, pending, strict=True):
            work.wait()
            bucket.div_(self._ranks)
        self._optimizer.step()

    def sample(self) -> list[float]:
        """The last number of every array."""
        return last_numbers(self._params)


def _buckets(params: list) -> list:
    """Flat tensors of which the parameters' gradients are views."""
    groups: list[list] = [[]]
    for param in params:
        if groups[-1] and sum(p.numel() for p in groups[-1]) + param.numel() > _BUCKET_NUMBERS:
            groups.append([])
        groups[-1].append(param)
    buckets = []
    for group in groups:
        bucket = torch.empty(sum(param.numel() for param in group))
        parts = bucket.split([param.numel() for param in group])
        for param, part in zip(group, parts, strict=True):
            param.grad = part.view(param.shape)
        buckets.append(bucket)
    return buckets


def run_rank(rank: int, problem: dict, folder: str, asked: Connection) -> None:
    """Be one rank."""
    ranks = len(problem["scales"])
    make = lambda variant: Replica(problem, rank, sharded=variant == "zero")
    answer(rank, ranks, problem["cores"], folder, asked, make)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    serve(run_rank, len(asked["scales"]), asked, {"PyTorch": torch.__version__})
