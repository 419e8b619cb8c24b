"""Batches from a generator of numpy arrays: python examples/data/with_numpy.py FOLDER 20"""

import itertools

import numpy as np
from loop import ROWS, Numbered, data, main


def batches_of(process, processes):
    """This process's rows of each batch."""
    columns = data()

    def make(start):
        for number in itertools.count(start):
            # Each batch has a generator of its own, so that any of them can be the first.
            drawn = np.random.default_rng([0, number]).integers(1024, size=ROWS)
            own = np.split(drawn, processes)[process]
            yield {name: column[own] for name, column in columns.items()}

    return Numbered(make)


if __name__ == "__main__":
    main(batches_of)
