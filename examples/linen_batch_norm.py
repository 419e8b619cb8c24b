"""Flax Linen with batch norm, in float16: `batch_stats` is the model state, the loss is scaled."""

import jax
import numpy as np
import optax
from flax import linen as nn

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.adamw(1e-2)


class Network(nn.Module):
    """Two layers with a BatchNorm between them, over the rows of all shards."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(32, use_bias=False, dtype="float16")(x)
        x = nn.BatchNorm(not train, momentum=0.9, dtype="float16", axis_name="shards")(x)
        return nn.Dense(3)(nn.tanh(x))


network = Network()


def data():
    """384 points in three clusters, and the number of the cluster of each."""
    label = np.arange(384) % 3
    center = np.array([[0, 2], [2, -1], [-2, -1]])[label]
    return {"x": center + np.random.default_rng(0).normal(size=(384, 2)), "label": label}


def loss_fn(params, stats, batch):
    """The mean cross-entropy on one shard's part of the batch, and the new statistics."""
    variables = {"params": params, **stats}
    logits, stats = network.apply(variables, batch["x"], train=True, mutable=list(stats))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), stats


def main(optimizer=OPTIMIZER, steps=60):
    """Train, and return parameters and statistics."""
    batch = data()
    stats = network.init(jax.random.key(0), batch["x"], train=False)
    params = stats.pop("params")
    step = crossshard.make_train_step(loss_fn, optimizer, model_state="mean", loss_scale="dynamic")
    state = step.init(params, model_state=stats)
    for number in range(steps):
        state, metrics = step(state, batch)
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:2}   loss {metrics['loss']:.4f}   scale {metrics['loss_scale']:g}")
    params, stats = step.model(state)
    logits = network.apply({"params": params, **stats}, batch["x"], train=False)
    print(f"accuracy {(logits.argmax(axis=-1) == batch['label']).mean():.1%}")
    return params, stats


if __name__ == "__main__":
    main()
