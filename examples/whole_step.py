"""The whole step: `make_train_step` compiles loss, gradients, reduction and update together.

Each shard updates its part of the parameters and keeps its part of the optimizer state. A mask
says which labels count, so batches do not have to divide evenly.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
BATCH = 128


class Network(nnx.Module):
    """A network that says in which quarter of the plane a point lies."""

    def __init__(self, rngs):
        self.first = nnx.Linear(2, 64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.second(jnp.tanh(self.first(x)))))


def data():
    """500 points of the plane and their quarters; one label in five is missing."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(500, 2))
    label = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
    return {"x": x, "label": label, "mask": rng.uniform(size=500) < 0.8}


def loss_fn(model, batch):
    """The mean cross-entropy of the labels that count, on one shard's part of a batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def main(optimizer=OPTIMIZER, epochs=10, params="replicated"):
    """Train, and return the model."""
    step = crossshard.make_train_step(
        loss_fn, optimizer, weight_update="sharded", params=params, weight="mask"
    )
    state = step.init(Network(rngs=nnx.Rngs(0)))
    print(step.describe())
    points = data()
    for epoch in range(epochs):
        for start in range(0, len(points["x"]), BATCH):  # the last batch has 116 rows: it is padded
            batch = {name: rows[start : start + BATCH] for name, rows in points.items()}
            state, metrics = step(state, batch)
        print(f"epoch {epoch}   loss {metrics['loss']:.4f}")
    model = step.model(state)  # an ordinary Network, to evaluate or to save
    accuracy = (model(points["x"]).argmax(axis=-1) == points["label"]).mean()
    print(f"accuracy {accuracy:.1%}, also where the label was missing")
    return model


if __name__ == "__main__":
    main()
