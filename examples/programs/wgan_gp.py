"""A Wasserstein GAN with gradient penalty: two optimizers, five steps of the critic to one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import crossshard

OPTIMIZER = optax.adam(1e-3, b1=0.0, b2=0.9)


def init_mlp(rng, sizes):
    weights = [rng.normal(size=s) / s[0] ** 0.5 for s in itertools.pairwise(sizes)]
    return [{"w": jnp.float32(w), "b": jnp.zeros(w.shape[1])} for w in weights]


def mlp(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def critic_loss(critic, gen, real, noise, eps):
    fake = mlp(gen, noise)
    mixed = eps * real + (1 - eps) * fake
    slopes = jax.vmap(jax.grad(lambda x: mlp(critic, x)[0]))(mixed)
    penalty = (jnp.sqrt((slopes**2).sum(1) + 1e-12) - 1) ** 2
    return mlp(critic, fake).mean() - mlp(critic, real).mean() + 10 * penalty.mean()


def gen_loss(gen, critic, noise):
    return -mlp(critic, mlp(gen, noise)).mean()


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        real, noise = rng.normal(size=(32, 2)) * [1, 2] + 1, rng.normal(size=(32, 4))
        yield np.float32(real), np.float32(noise), np.float32(rng.uniform(size=(32, 1)))


def main(optimizer=OPTIMIZER, steps=10):
    rng = np.random.default_rng(1)
    gen, critic = init_mlp(rng, (4, 16, 2)), init_mlp(rng, (2, 16, 1))
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    gen_state, critic_state = optimizer.init(gen), optimizer.init(critic)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P(), *3 * [P("data")]), out_specs=P())
    def critic_step(critic, critic_state, gen, real, noise, eps):
        grads = crossshard.grad(critic_loss)(critic, gen, real, noise, eps)
        updates, critic_state = optimizer.update(grads, critic_state)
        return optax.apply_updates(critic, updates), critic_state

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P())
    def gen_step(gen, gen_state, critic, noise):
        grads = crossshard.grad(gen_loss)(gen, critic, noise)
        updates, gen_state = optimizer.update(grads, gen_state)
        return optax.apply_updates(gen, updates), gen_state

    for number, (real, noise, eps) in enumerate(data(steps)):
        critic, critic_state = critic_step(critic, critic_state, gen, real, noise, eps)
        if number % 5 == 4:
            gen, gen_state = gen_step(gen, gen_state, critic, noise)
    return gen, critic


if __name__ == "__main__":
    main()
