"""PyTorch's part in the benchmark of processes: whole steps of DDP, with ZeRO or its fp16 hook.

Run by an interpreter that has torch, so it imports nothing of crossshard; what is said to it and
what it answers is told in ../peer.py. Model, rows and numbers are those of jax_ranks_peer.py.
"""

import contextlib
import json
import sys
from multiprocessing.connection import Connection

import torch  # type: ignore[import-not-found]
from gloo_ranks import (  # type: ignore[import-not-found]
    adamw,
    answer,
    last_numbers,
)
from ranks import serve  # type: ignore[import-not-found]
from torch.distributed.algorithms.ddp_comm_hooks import (  # type: ignore[import-not-found]
    default_hooks,
)
from torch.nn.parallel import (  # type: ignore[import-not-found]
    DistributedDataParallel,
)

# The parts of a step, and the float32 numbers of a bucket of DDP, 25 MiB.
_PARTS = ("gradients", "sum", "update")
_NUMBERS_OF_BUCKET = 25 * 2**18


def scattered(first: int, shape: tuple[int, int]) -> torch.Tensor:
    """Numbers from -1 to 1 that follow from their index alone, float64."""
    index = torch.arange(first, first + shape[0] * shape[1], dtype=torch.int64)
    return ((index * 2654435761 % 2**32).double() / 2**31 - 1).view(shape)


class Trainer:
    """One rank's copy of the model, its rows of the batch, and an optimizer.

    Args:
      problem: the width and depth of the model, the rows, and numbers of the optimizer.
      rank: whose rows to take.
      variant: ``"ddp"``; ``"zero"`` if each rank updates a part of the parameters and broadcasts
        it; ``"fp16"`` if gradients are sent in 16 bits. Or a part of the first, alone:
        ``"gradients"``, ``"sum"``, ``"update"``.
    """

    def __init__(self, problem: dict, rank: int, variant: str) -> None:
        width, layers, rows = (problem[name] for name in ("width", "layers", "rows"))
        model = torch.nn.Sequential()
        for layer in range(layers):
            if layer:
                model.append(torch.nn.ReLU())
            model.append(torch.nn.Linear(width, width))
            with torch.no_grad():
                kernel = scattered(layer * width**2, (width, width)) * (6 / width) ** 0.5
                model[-1].weight.copy_(kernel.T)
                model[-1].bias.zero_()
        # Gradients in the buckets that are sent, its fastest way.
        self._model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        if variant == "fp16":
            self._model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        self._params, self._variant = list(model.parameters()), variant
        if variant == "update":
            for param in self._params:
                param.grad = torch.ones_like(param)
        numbers = torch.zeros(sum(param.numel() for param in self._params))
        self._buckets = numbers.split(_NUMBERS_OF_BUCKET)
        own = slice(rank * rows // problem["ranks"], (rank + 1) * rows // problem["ranks"])
        self._x = scattered(layers * width**2, (rows, width))[own].float()
        self._y = scattered(layers * width**2 + rows * width, (rows, width))[own].float()
        self._optimizer = adamw(self._params, problem, sharded=variant == "zero")

    def step(self) -> None:
        """Forward, backward beside the reduction, and update; or a part of these."""
        if self._variant == "sum":
            for bucket in self._buckets:
                torch.distributed.all_reduce(bucket)
            return
        if self._variant == "update":
            self._optimizer.step()
            return
        # Not to None: the gradients are views of the buckets.
        self._optimizer.zero_grad(set_to_none=False)
        alone = self._variant == "gradients"
        with self._model.no_sync() if alone else contextlib.nullcontext():
            loss = torch.nn.functional.mse_loss(self._model(self._x), self._y)
            loss.backward()
        if not alone:
            self._optimizer.step()
        loss.item()

    def sample(self) -> list[float]:
        """The last number of every array, biases last."""
        if self._variant in _PARTS:
            return []
        return last_numbers(self._params[::2]) + last_numbers(self._params[1::2])


def run_rank(rank: int, problem: dict, folder: str, asked: Connection) -> None:
    """Be one rank."""
    make = lambda variant: Trainer(problem, rank, variant)
    answer(rank, problem["ranks"], problem["cores"], folder, asked, make)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    serve(run_rank, asked["ranks"], asked, {"PyTorch": torch.__version__})
