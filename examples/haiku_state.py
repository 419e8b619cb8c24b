"""A Haiku function with state: running statistics of its inputs, averaged over the shards."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.adam(1e-2)


@hk.transform_with_state
def network(x):
    """Two layers on inputs that are scaled by the mean and the mean square of earlier batches."""
    mean = hk.get_state("mean", [1], init=jnp.zeros)
    square = hk.get_state("square", [1], init=jnp.ones)
    hk.set_state("mean", 0.9 * mean + 0.1 * x.mean(axis=0))
    hk.set_state("square", 0.9 * square + 0.1 * (x**2).mean(axis=0))
    hidden = hk.Linear(32)((x - mean) / jnp.sqrt(square - mean**2))
    return hk.Linear(1)(jnp.tanh(hidden))


def data():
    """256 numbers around 1, and their sines."""
    x = np.random.default_rng(0).uniform(-1, 3, size=(256, 1))
    return {"x": x, "y": np.sin(x)}


def loss_fn(params, state, batch):
    """The mean squared error on one shard's part of the batch, and the new statistics."""
    out, state = network.apply(params, state, None, batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), state


def main(optimizer=OPTIMIZER, steps=100):
    """Train, and return parameters and state."""
    batch = data()
    params, model_state = network.init(jax.random.key(0), batch["x"])
    step = crossshard.make_train_step(loss_fn, optimizer, model_state="mean")
    state = step.init(params, model_state=model_state)
    for number in range(steps):
        state, metrics = step(state, batch)
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:2}   loss {metrics['loss']:.5f}")
    params, model_state = step.model(state)
    mean = model_state["~"]["mean"][0]
    print(f"the running mean is {mean:.2f}, and the mean {batch['x'].mean():.2f}")
    return params, model_state


if __name__ == "__main__":
    main()
