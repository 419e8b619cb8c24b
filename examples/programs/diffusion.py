"""A diffusion model: noise and times drawn in the loss, a moving average to sample with."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import crossshard

OPTIMIZER = optax.adam(1e-3)
DECAY = 0.99


class Score(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(9, 8, 32, 2, key=key)

    def __call__(self, t, y):
        return self.mlp(jnp.append(y, t))


def single_loss_fn(model, data, t, key):
    std = jnp.sqrt(1 - jnp.exp(-t))
    noise = jax.random.normal(key, data.shape)
    pred = model(t, data * jnp.exp(-0.5 * t) + std * noise)
    return jnp.mean((pred * std + noise) ** 2)


def batch_loss_fn(model, data, key):
    batch_size = data.shape[0]
    tkey, losskey = jax.random.split(key)
    losskey = jax.random.split(losskey, batch_size)
    # Low-discrepancy sampling over t to reduce variance
    t = jax.random.uniform(tkey, (batch_size,), minval=0, maxval=10 / batch_size)
    t = t + (10 / batch_size) * jnp.arange(batch_size)
    return jnp.mean(jax.vmap(single_loss_fn, (None, 0, 0, 0))(model, data, t, losskey))


@eqx.filter_jit
def make_step(model, average, data, key, opt_state, opt_update):
    grads = eqx.filter_grad(batch_loss_fn)(model, data, key)
    updates, opt_state = opt_update(grads, opt_state)
    model = eqx.apply_updates(model, updates)
    average = jax.tree.map(
        lambda a, p: DECAY * a + (1 - DECAY) * p if eqx.is_array(a) else a, average, model
    )
    return model, average, opt_state


def dataloader(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield rng.normal(size=(32, 8)).astype(np.float32)


def main(optimizer=OPTIMIZER, steps=5):
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = average = Score(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    key = jax.random.key(1)
    for data in dataloader(steps):
        data = jax.device_put(data, jax.NamedSharding(mesh, P("data")))
        key, step_key = jax.random.split(key)
        model, average, opt_state = make_step(
            model, average, data, step_key, opt_state, optimizer.update
        )
    return eqx.filter((model, average), eqx.is_inexact_array)


if __name__ == "__main__":
    main()
