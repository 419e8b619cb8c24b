"""DP-SGD: the gradient of every example is clipped, and noise is added to their mean."""

import jax
import numpy as np
import optax
from flax import linen as nn
from jax import P

import crossshard

OPTIMIZER = optax.sgd(0.1)
BATCH, CLIP, NOISE_MULTIPLIER = 32, 1.0, 1.1


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), (2, 2))(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


net = CNN()


def loss_fn(params, batch):
    logits = net.apply({"params": params}, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        label = rng.integers(10, size=BATCH)
        image = rng.normal(size=(BATCH, 8, 8, 1)) + label[:, None, None, None] / 5
        yield {"image": image.astype(np.float32), "label": label}


def main(optimizer=OPTIMIZER, steps=4):
    clip = optax.contrib.differentially_private_aggregate(CLIP, 0.0, jax.random.key(0))
    noise = optax.add_noise((CLIP * NOISE_MULTIPLIER / BATCH) ** 2, 0.0, jax.random.key(1))
    tx = crossshard.CrossShardOptimizer(optax.chain(noise, optimizer), preprocess=clip)
    params = net.init(jax.random.key(0), np.ones((1, 8, 8, 1)))["params"]
    specs = tx.state_specs(params, num_shards=8)
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    opt_state = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)(params)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("shards")), out_specs=(P(), specs))
    def train_step(params, opt_state, batch):
        each = jax.tree.map(lambda x: x[:, None], batch)
        grads = jax.vmap(crossshard.grad(loss_fn), in_axes=(None, 0))(params, each)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in data(steps):
        params, opt_state = train_step(params, opt_state, batch)
    return params


if __name__ == "__main__":
    main()
