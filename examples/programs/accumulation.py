"""A vision transformer, its gradients accumulated over four microbatches by `optax.MultiSteps`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.adamw(1e-3)


class ViT(eqx.Module):
    patch: eqx.nn.Linear
    position: jax.Array
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.patch = eqx.nn.Linear(16, 16, key=keys[0])
        self.position = 0.02 * jax.random.normal(keys[1], (4, 16))
        self.norm = eqx.nn.LayerNorm(16)
        self.attention = eqx.nn.MultiheadAttention(4, 16, key=keys[2])
        self.mlp = eqx.nn.MLP(16, 16, 32, 1, key=keys[3])
        self.head = eqx.nn.Linear(16, 10, key=keys[4])

    def __call__(self, image):
        patches = image.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).reshape(4, 16)
        x = jax.vmap(self.patch)(patches) + self.position
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        x = x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))
        return self.head(x.mean(0))


def loss_fn(model, batch):
    logits = jax.vmap(model)(batch["image"])
    labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.1)
    return jnp.mean(optax.softmax_cross_entropy(logits, labels))


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        label = rng.integers(10, size=64)
        image = rng.normal(size=(64, 8, 8)) + label[:, None, None] / 5
        yield {"image": image.astype(np.float32), "label": label}


def main(optimizer=OPTIMIZER, steps=3):
    model = ViT(jax.random.key(0))
    step = crossshard.make_train_step(loss_fn, optimizer, accumulate_steps=4)
    state = step.init(model)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return eqx.filter(step.model(state), eqx.is_array)


if __name__ == "__main__":
    main()
