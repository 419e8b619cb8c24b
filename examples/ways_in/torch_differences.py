"""What to know of PyTorch: torchrun --standalone --nproc-per-node 4 torch_differences.py"""

import contextlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

TOKENS = [40, 10, 30, 20]  # of each rank


def line(value=0.0):
    """A model of one parameter, `y = w x`."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def masked():
    """The gradient of a mean over tokens, of which ranks have different numbers."""
    model = DistributedDataParallel(line())
    rank = dist.get_rank()
    x = torch.full((TOKENS[rank], 1), 1.0 + rank)
    model(x).mean().backward()
    return model.module.weight.grad.item()


def accumulated():
    """The gradient of two microbatches with a slope of 1, of which the first is not sent."""
    model = DistributedDataParallel(line())
    for last in (False, True):
        with contextlib.nullcontext() if last else model.no_sync():
            model(torch.ones(8, 1)).mean().backward()
    return model.module.weight.grad.item()


def averages():
    """A moving average after each of three steps, from 0 by 1."""
    model = line()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    found = []
    for _ in range(3):
        with torch.no_grad():
            model.weight += 1
        average.update_parameters(model)
        found.append(average.module.weight.item())
    return found


def layers():
    """What layers compute with their defaults."""
    x = torch.tensor([[0.0, 1.0, 3.0], [2.0, 5.0, -1.0]])
    norm = nn.BatchNorm1d(3)
    norm(x)
    return {
        "running_var": norm.running_var.tolist(),
        "layer_norm": nn.LayerNorm(3)(x / 100).tolist(),
        "gelu": nn.functional.gelu(x).tolist(),
    }


def stepped(kind, **options):
    """A parameter after five steps with fixed gradients."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = kind([weight], **options)
    for number in range(5):
        weight.grad = torch.tensor([1e-4, -3.0, 0.5]) * (1 + number)
        optimizer.step()
    return weight.tolist()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {
        "masked": masked(),
        "accumulated": accumulated(),
        "averages": averages(),
        **layers(),
        "SGD(0.1)": stepped(torch.optim.SGD, lr=0.1),
        "SGD(0.1, momentum=0.9)": stepped(torch.optim.SGD, lr=0.1, momentum=0.9),
        "SGD(0.1, weight_decay=0.1)": stepped(torch.optim.SGD, lr=0.1, weight_decay=0.1),
        "Adam(0.1)": stepped(torch.optim.Adam, lr=0.1),
        "Adam(0.1, weight_decay=0.1)": stepped(torch.optim.Adam, lr=0.1, weight_decay=0.1),
        "AdamW(0.1)": stepped(torch.optim.AdamW, lr=0.1),
        "RMSprop(0.1)": stepped(torch.optim.RMSprop, lr=0.1),
        "Adagrad(0.1)": stepped(torch.optim.Adagrad, lr=0.1),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
