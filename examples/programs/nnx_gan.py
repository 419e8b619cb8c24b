"""A GAN in NNX: generator and discriminator take turns, each with its own optimizer."""

import itertools

import numpy as np
import optax
from flax import nnx

import crossshard

OPTIMIZER = optax.adam(2e-4, b1=0.5)


def mlp(sizes, rngs):
    layers = []
    for i, o in itertools.pairwise(sizes):
        layers += [nnx.Linear(i, o, rngs=rngs), nnx.leaky_relu]
    return nnx.Sequential(*layers[:-1])


@crossshard.shard(num_shards=8)
def train_step(gen, disc, opt_g, opt_d, real, noise):
    def loss_d(disc):
        on_real, on_fake = disc(real), disc(gen(noise))
        of_real = optax.sigmoid_binary_cross_entropy(on_real, 0.9 + 0 * on_real)
        return (of_real + optax.sigmoid_binary_cross_entropy(on_fake, 0 * on_fake)).mean()

    value_d, grads = nnx.value_and_grad(loss_d)(disc)
    opt_d.update(disc, grads)

    def loss_g(gen):
        on_fake = disc(gen(noise))
        return optax.sigmoid_binary_cross_entropy(on_fake, 1 + 0 * on_fake).mean()

    value_g, grads = nnx.value_and_grad(loss_g)(gen)
    opt_g.update(gen, grads)
    return value_d, value_g


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        angle = rng.uniform(0, 2 * np.pi, size=32)
        real = np.stack([np.cos(angle), np.sin(angle)], 1) + 0.05 * rng.normal(size=(32, 2))
        yield real.astype(np.float32), rng.normal(size=(32, 4)).astype(np.float32)


def main(optimizer=OPTIMIZER, steps=5):
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    gen, disc = mlp((4, 32, 2), nnx.Rngs(0)), mlp((2, 32, 1), nnx.Rngs(1))
    opt_g = nnx.Optimizer(gen, optimizer, wrt=nnx.Param)
    opt_d = nnx.Optimizer(disc, optimizer, wrt=nnx.Param)
    for real, noise in data(steps):
        loss_d, loss_g = train_step(gen, disc, opt_g, opt_d, real, noise)
        print(f"discriminator {loss_d.mean():.4f}   generator {loss_g.mean():.4f}")
    return nnx.state(gen), nnx.state(disc)


if __name__ == "__main__":
    main()
