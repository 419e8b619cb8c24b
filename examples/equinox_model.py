"""An Equinox model: `make_train_step` takes it as it is, and `model(state)` returns one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.adam(1e-2)


def data():
    """256 numbers and their sines."""
    x = np.random.default_rng(0).uniform(-3, 3, size=(256, 1))
    return {"x": x, "y": np.sin(x)}


def initial_model():
    """A network whose leaves are arrays and, as usual in Equinox, an activation function."""
    return eqx.nn.MLP(1, 1, width_size=32, depth=2, activation=jnp.tanh, key=jax.random.key(0))


def loss_fn(model, batch):
    """The mean squared error on one shard's part of the batch."""
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def main(optimizer=OPTIMIZER, steps=100, params="replicated"):
    """Train, and return the model."""
    step = crossshard.make_train_step(loss_fn, optimizer, params=params)
    state = step.init(initial_model())  # without eqx.partition: the floating arrays are trained
    batch = data()
    for number in range(steps):
        state, metrics = step(state, batch)
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:2}   loss {metrics['loss']:.5f}")
    model = step.model(state)
    print(f"sin(1) = {np.sin(1):.3f}; the model returns {model(jnp.ones(1))[0]:.3f}")
    return model


if __name__ == "__main__":
    main()
