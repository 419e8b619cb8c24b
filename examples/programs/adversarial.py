"""Adversarial training: the loss of images that a projected gradient ascent has moved."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import crossshard

OPTIMIZER = optax.adam(1e-3)
EPSILON, STEPS = 0.1, 3


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Conv(8, (3, 3), (2, 2))(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


net = CNN()


def loss_fun(params, images, labels, l2reg=1e-4):
    logits = net.apply({"params": params}, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    l2 = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    return jnp.mean(losses) + 0.5 * l2reg * l2


def pgd_attack(params, images, labels):
    perturbation = jnp.zeros_like(images)
    for _ in range(STEPS):
        of_moved = lambda delta: loss_fun(params, images + delta, labels)
        ascent = jnp.sign(jax.grad(of_moved)(perturbation))
        perturbation = jnp.clip(perturbation + 2 * EPSILON / STEPS * ascent, -EPSILON, EPSILON)
    return images + perturbation


def adversarial_loss(params, batch):
    images, labels = batch
    moved = pgd_attack(jax.lax.stop_gradient(params), images, labels)
    return 0.5 * (loss_fun(params, images, labels) + loss_fun(params, moved, labels))


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        labels = rng.integers(10, size=32)
        images = rng.normal(size=(32, 8, 8, 1)) + labels[:, None, None, None] / 5
        yield images.astype(np.float32), labels


def main(optimizer=OPTIMIZER, steps=4):
    params = net.init(jax.random.key(0), np.ones((1, 8, 8, 1)))["params"]
    step = crossshard.make_train_step(adversarial_loss, optimizer)
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
