"""A Flax Linen model: its parameters are a pytree, which `make_train_step` trains.

Give `init` the "params" collection alone. Here the model has no other collection, such as
"batch_stats".
"""

import jax
import numpy as np
import optax
from flax import linen as nn

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.adamw(1e-2)


class Network(nn.Module):
    """Two layers with a LayerNorm between them, which keeps no statistics."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(32)(x))
        return nn.Dense(3)(nn.tanh(x))


network = Network()


def data():
    """384 points in three clusters, and the number of the cluster of each."""
    label = np.arange(384) % 3
    center = np.array([[0, 2], [2, -1], [-2, -1]])[label]
    return {"x": center + np.random.default_rng(0).normal(size=(384, 2)), "label": label}


def loss_fn(params, batch):
    """The mean cross-entropy on one shard's part of the batch."""
    logits = network.apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def main(optimizer=OPTIMIZER, steps=60):
    """Train, and return the parameters."""
    batch = data()
    variables = network.init(jax.random.key(0), batch["x"])
    step = crossshard.make_train_step(loss_fn, optimizer)
    state = step.init(variables["params"])
    for number in range(steps):
        state, metrics = step(state, batch)
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:2}   loss {metrics['loss']:.4f}")
    params = step.model(state)
    logits = network.apply({"params": params}, batch["x"])
    print(f"accuracy {(logits.argmax(axis=-1) == batch['label']).mean():.1%}")
    return params


if __name__ == "__main__":
    main()
