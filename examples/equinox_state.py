"""An Equinox model with `eqx.nn.State`: the statistics of its batch norm are the model state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.adam(1e-2)


class Network(eqx.Module):
    """Two layers with a BatchNorm between them, over the rows of all shards."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(2, 32, use_bias=False, key=keys[0])
        self.norm = eqx.nn.BatchNorm(32, axis_name=("batch", "shards"), mode="batch")
        self.second = eqx.nn.Linear(32, 1, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.second(jnp.tanh(x))[0], state


def data():
    """256 points of the plane, and the product of their coordinates."""
    x = np.random.default_rng(0).uniform(-1, 1, size=(256, 2))
    return {"x": x, "y": x[:, 0] * x[:, 1]}


def loss_fn(model, state, batch):
    """The mean squared error on one shard's part of the batch, and the new statistics."""
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    out, state = run(batch["x"], state)
    return jnp.mean((out - batch["y"]) ** 2), state


def main(optimizer=OPTIMIZER, steps=100):
    """Train, and return the model and its state."""
    step = crossshard.make_train_step(loss_fn, optimizer, model_state="mean")
    model, statistics = eqx.nn.make_with_state(Network)(jax.random.key(0))
    state = step.init(model, model_state=statistics)
    for number in range(steps):
        state, metrics = step(state, data())
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:2}   loss {metrics['loss']:.5f}")
    return step.model(state)


if __name__ == "__main__":
    main()
