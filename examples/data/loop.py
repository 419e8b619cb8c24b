"""What the loops of this folder share: rows, a model, and batches that go on after a restart."""

import sys

import jax.numpy as jnp
import numpy as np
import optax

import crossshard

# Of a batch, in all processes together.
ROWS = 64


def data():
    """1024 rows, and what to say of each."""
    x = np.random.default_rng(0).normal(size=(1024, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0]) + x[:, 1]}


def loss_fn(params, batch):
    """The mean squared error of a linear model."""
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


class Numbered:
    """The batches that `make(number)` yields from this number on, which is their state."""

    def __init__(self, make):
        self.make, self.number, self.batches = make, 0, None

    def __iter__(self):
        return self

    def __next__(self):
        if self.batches is None:
            self.batches = iter(self.make(self.number))
        batch = next(self.batches)
        self.number += 1
        return batch

    def get_state(self):
        return self.number

    def set_state(self, number):
        self.number, self.batches = number, None


def train(batches, folder, steps):
    """Train until so many steps are taken, from the last checkpoint on; print each loss."""
    step = crossshard.make_train_step(loss_fn, optax.sgd(0.1))
    params = {"w": np.zeros(8, np.float32), "b": np.float32(0)}
    batches = step.prefetch(batches, 2)
    with crossshard.Checkpoints(folder, step) as checkpoints:
        found = checkpoints.restore_latest(step.abstract_init(params))
        # `state.step` does not count batches whose step was skipped, so this loop counts its own.
        start = {"number": 0, "batches": batches.get_state()}
        state, data = found or (step.init(params), start)
        batches.set_state(data["batches"])
        for number, batch in enumerate(batches, data["number"] + 1):
            state, metrics = step(state, batch)
            print(number, f"{metrics['loss']:.9f}", flush=True)
            if number % 5 == 0:
                checkpoints.save(state, data={"number": number, "batches": batches})
            if number == steps:
                break
    return state


def main(batches_of):
    """Train with `batches_of(process, processes)`, in one process or as one of several."""
    crossshard.cpu_devices(4)  # on GPUs and TPUs this changes nothing
    job = crossshard.distributed.initialize()
    return train(batches_of(job.process_id, job.num_processes), sys.argv[1], int(sys.argv[2]))
