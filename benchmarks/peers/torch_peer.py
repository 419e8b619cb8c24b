"""PyTorch's part in the benchmarks: AdamW over gloo ranks on this machine, each a process.

Run by an interpreter that has torch, so it imports nothing of crossshard; what is said to it and
what it answers is told in ../peer.py. The gradients of each rank are given, laid out as in a
DistributedDataParallel with gradient_as_bucket_view: in buckets of 25 MiB that are reduced as they
are, without a copy, all under way at once.
"""

import json
import os
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
import torch.multiprocessing as multiprocessing  # type: ignore[import-not-found]
from torch.distributed.optim import (  # type: ignore[import-not-found]
    ZeroRedundancyOptimizer,
)

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
        numbers = {
            "lr": problem["learning_rate"],
            "betas": (problem["b1"], problem["b2"]),
            "eps": problem["eps"],
            "weight_decay": problem["weight_decay"],
            "fused": True,
        }
        if sharded:
            self._optimizer = ZeroRedundancyOptimizer(
                self._params, torch.optim.AdamW, parameters_as_bucket_view=True, **numbers
            )
        else:
            self._optimizer = torch.optim.AdamW(self._params, **numbers)

    def step(self) -> None:
        """Reduce and update. The mean stays in the buckets, so the next one is of equal parts."""
        pending = [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]
        for bucket, work in zip(self._buckets, pending, strict=True):
            work.wait()
            bucket.div_(self._ranks)
        self._optimizer.step()

    def sample(self) -> list[float]:
        """The last number of every array."""
        return [param.flatten()[-1].item() for param in self._params]


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
    """Be one rank: sleep until a question comes, answer it, leave at None."""
    ranks = len(problem["scales"])
    torch.set_num_threads(max(1, problem["cores"] // ranks))
    # A file for a meeting place and the loopback for messages: nothing listens to the outside.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks
    )
    replicas: dict[str, Replica] = {}
    while (question := asked.recv()) is not None:
        variant = question["variant"]
        if variant not in replicas:
            replicas[variant] = Replica(problem, rank, sharded=variant == "zero")
        dist.barrier()
        began = time.perf_counter()
        for _ in range(question["steps"]):
            replicas[variant].step()
        dist.barrier()
        seconds = time.perf_counter() - began
        asked.send({"seconds": seconds, "sample": replicas[variant].sample()})
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, pass every question on to all of them, and answer for the last one."""
    # Answers go where stdout went; whatever else is printed must not stand between them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    problem = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks, ends = [], []
        for rank in range(len(problem["scales"])):
            ours, theirs = context.Pipe()
            arguments = (rank, problem, folder, theirs)
            ranks.append(context.Process(target=run_rank, args=arguments, daemon=True))
            ranks[-1].start()
            # Or a rank that dies would leave us waiting for its answer.
            theirs.close()
            ends.append(ours)
        for line in sys.stdin:
            question = json.loads(line)
            if question["variant"] == "versions":
                answer = {"versions": {"PyTorch": torch.__version__}}
            else:
                for end in ends:
                    end.send(question)
                answer = [end.recv() for end in ends][-1]
            print(json.dumps(answer), file=answers, flush=True)
        for end in ends:
            end.send(None)
        for rank_process in ranks:
            rank_process.join()


if __name__ == "__main__":
    main()
