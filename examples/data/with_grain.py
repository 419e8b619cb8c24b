"""Batches from Grain, whose iterators have a state: python examples/data/with_grain.py FOLDER 20"""

import grain
from loop import ROWS, data, main


def batches_of(process, processes):
    """This process's rows of each batch."""
    x, y = data().values()
    numbers = grain.MapDataset.range(len(x)).seed(0).shuffle().repeat()
    own = numbers[process::processes].map(lambda n: {"x": x[n], "y": y[n]})
    return iter(own.batch(ROWS // processes).to_iter_dataset())


if __name__ == "__main__":
    main(batches_of)
