"""Image classification in Equinox: `filter_jit`, `filter_value_and_grad`, a vmapped network."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.adamw(3e-3)


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        one, two, three = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 4, kernel_size=3, key=one),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(100, 32, key=two),
            jax.nn.sigmoid,
            eqx.nn.Linear(32, 10, key=three),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cross_entropy(y, pred_y):
    pred_y = jnp.take_along_axis(pred_y, jnp.expand_dims(y, 1), axis=1)
    return -jnp.mean(pred_y)


def loss_fn(model, batch):
    x, y = batch
    return cross_entropy(y, jax.vmap(model)(x))


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        labels = rng.integers(10, size=32)
        images = rng.normal(size=(32, 1, 8, 8)) + labels[:, None, None, None] / 5
        yield images.astype(np.float32), labels


def main(optimizer=OPTIMIZER, steps=5):
    model = CNN(jax.random.key(0))
    step = crossshard.make_train_step(loss_fn, optimizer)
    state = step.init(model)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return eqx.filter(step.model(state), eqx.is_array)


if __name__ == "__main__":
    main()
