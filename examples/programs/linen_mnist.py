"""Image classification: a convolutional network and Flax's `TrainState`."""

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax import P

import crossshard

OPTIMIZER = optax.sgd(0.1, momentum=0.9)

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(10)(x)


def loss_fn(params, apply_fn, images, labels):
    logits = apply_fn({"params": params}, images)
    one_hot = jax.nn.one_hot(labels, 10)
    return optax.softmax_cross_entropy(logits, one_hot).mean(), logits


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
def train_step(state, images, labels):
    grad_fn = crossshard.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(state.params, state.apply_fn, images, labels)
    accuracy = (logits.argmax(-1) == labels).mean()
    state = state.apply_gradients(grads=grads)
    return state, *jax.lax.pmean((loss, accuracy), "data")


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        labels = rng.integers(10, size=32)
        images = rng.normal(size=(32, 8, 8, 1)) + labels[:, None, None, None] / 5
        yield images.astype(np.float32), labels


def main(optimizer=OPTIMIZER, steps=5):
    cnn = CNN()
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    params = cnn.init(jax.random.key(0), np.ones((1, 8, 8, 1)))["params"]
    state = train_state.TrainState.create(apply_fn=cnn.apply, params=params, tx=optimizer)
    for images, labels in data(steps):
        state, loss, accuracy = train_step(state, images, labels)
        print(f"loss {loss:.4f}   accuracy {accuracy:.2f}")
    return state.params


if __name__ == "__main__":
    main()
