"""A variational autoencoder: the latent variables are drawn with a key, one for each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax import P

import crossshard

OPTIMIZER = optax.adam(1e-3)
LATENTS = 4


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, z_rng):
        h = nn.relu(nn.Dense(32)(x))
        mean, logvar = nn.Dense(LATENTS)(h), nn.Dense(LATENTS)(h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(z_rng, logvar.shape)
        h = nn.relu(nn.Dense(32)(z))
        return nn.Dense(x.shape[-1])(h), mean, logvar


model = VAE()


@jax.vmap
def kl_divergence(mean, logvar):
    return -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar))


@jax.vmap
def binary_cross_entropy_with_logits(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels).sum()


@jax.jit
def train_step(state, batch, z_rng):
    def loss_fn(params):
        recon_x, mean, logvar = model.apply({"params": params}, batch, z_rng)
        bce_loss = binary_cross_entropy_with_logits(recon_x, batch).mean()
        return bce_loss + kl_divergence(mean, logvar).mean()

    grads = jax.grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads)


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield (rng.random((32, 16)) < rng.random((32, 1))).astype(np.float32)


def main(optimizer=OPTIMIZER, steps=5):
    rng, key = jax.random.split(jax.random.key(0))
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = model.init(key, np.ones((1, 16)), rng)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    for batch in data(steps):
        batch = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
        rng, key = jax.random.split(rng)
        state = train_step(state, batch, key)
    return state.params


if __name__ == "__main__":
    main()
