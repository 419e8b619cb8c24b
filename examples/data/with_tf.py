"""Batches from tf.data: python examples/data/with_tf.py FOLDER 20"""

import tensorflow as tf
from loop import ROWS, Numbered, data, main


def batches_of(process, processes):
    """This process's rows of each batch."""
    tf.config.set_visible_devices([], "GPU")  # which are JAX's
    rows = tf.data.Dataset.from_tensor_slices(data()).shuffle(1024, seed=0).repeat()
    own = rows.batch(ROWS).map(lambda batch: {k: v[process::processes] for k, v in batch.items()})
    return Numbered(lambda start: own.skip(start).as_numpy_iterator())


if __name__ == "__main__":
    main(batches_of)
