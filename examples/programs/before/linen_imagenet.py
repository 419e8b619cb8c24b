"""Image classification with batch norm: a ResNet, weight decay in the loss, `batch_stats`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

OPTIMIZER = optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True)


class Block(nn.Module):
    features: int
    strides: tuple = (1, 1)

    @nn.compact
    def __call__(self, x, train):
        norm = lambda: nn.BatchNorm(use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = Block(8)(x, train)
        x = Block(16, (2, 2))(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


model = ResNet()


class TrainState(train_state.TrainState):
    batch_stats: Any


def loss_fn(params, batch_stats, batch):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, updates = model.apply(variables, batch["image"], mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    weight_l2 = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
    return loss + 1e-4 * 0.5 * weight_l2, updates["batch_stats"]


@jax.jit
def train_step(state, batch):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.params, state.batch_stats, batch)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        label = rng.integers(10, size=16)
        image = rng.normal(size=(16, 8, 8, 3)) + label[:, None, None, None] / 5
        yield {"image": image.astype(np.float32), "label": label}


def main(optimizer=OPTIMIZER, steps=3):
    variables = model.init(jax.random.key(0), np.ones((1, 8, 8, 3)))
    params, stats = variables["params"], variables["batch_stats"]
    state = TrainState.create(apply_fn=None, params=params, tx=optimizer, batch_stats=stats)
    for batch in data(steps):
        state, metrics = train_step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return state.params, state.batch_stats


if __name__ == "__main__":
    main()
