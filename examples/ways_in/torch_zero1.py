"""PyTorch's ZeRO-1: torchrun --standalone --nproc-per-node 4 torch_zero1.py"""

import json

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "betas": (0.9, 0.95)}),
}


def data():
    """512 rows of 16 numbers, and what to say of each."""
    x = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
    return x, np.sin(x[:, 0]) + x[:, 1] * x[:, 2] / 4


def network():
    """The same parameters in every rank; a weight is `[out, in]`."""
    rng = np.random.default_rng(1)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            inputs, outputs = layer.in_features, layer.out_features
            kernel = rng.normal(size=(inputs, outputs)) / inputs**0.5
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.zero_()
    return model


def train(kind, options):
    """Two epochs of eight global batches of 64 rows."""
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
    dataset = TensorDataset(*map(torch.from_numpy, data()))
    sampler = DistributedSampler(dataset, shuffle=False)
    rows = 64 // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=rows, sampler=sampler)

    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            dist.all_reduce(total := loss.detach().clone())
            losses.append(total.item() / dist.get_world_size())

    arrays = [parameter.detach() for parameter in model.parameters()]
    # Some numbers of each array, in the order of JAX.
    return {
        "losses": losses,
        "parameters": [array.t().flatten()[::61].tolist() for array in arrays],
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    trained = {name: train(*each) for name, each in OPTIMIZERS.items()}
    if dist.get_rank() == 0:
        print(json.dumps(trained))
    dist.destroy_process_group()
