"""Batches from PyTorch's DataLoader: python examples/data/with_torch.py FOLDER 20"""

import itertools

import torch
from loop import ROWS, Numbered, data, main
from torch.utils.data import DataLoader, TensorDataset


def batches_of(process, processes):
    """This process's rows of each batch."""
    dataset = TensorDataset(*map(torch.from_numpy, data().values()))

    def make(start):
        for epoch in itertools.count(start * ROWS // len(dataset)):
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch))
            # The first epoch begins in its midst.
            first = max(0, start - epoch * len(dataset) // ROWS)
            own = [rows.tolist()[process::processes] for rows in order.split(ROWS)[first:]]
            for x, y in DataLoader(dataset, batch_sampler=own):
                yield {"x": x.numpy(), "y": y.numpy()}

    return Numbered(make)


if __name__ == "__main__":
    main(batches_of)
