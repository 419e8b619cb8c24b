"""CLIP: an image and a text tower, each row compared with all rows of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import crossshard

OPTIMIZER = optax.adamw(1e-3, weight_decay=0.1)


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(nn.gelu(nn.Dense(32)(x)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class CLIP(nn.Module):
    @nn.compact
    def __call__(self, images, tokens):
        image = Tower(name="visual")(images.reshape(images.shape[0], -1))
        text = Tower(name="text")(nn.Embed(50, 16)(tokens).mean(1))
        scale = self.param("logit_scale", nn.initializers.constant(np.log(1 / 0.07)), ())
        return jnp.exp(scale) * image @ text.T


model = CLIP()


def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch["image"], batch["text"])
    labels = jnp.arange(logits.shape[0])
    of_images = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    of_texts = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
    return (of_images.mean() + of_texts.mean()) / 2


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        image = rng.normal(size=(32, 4, 4, 3)).astype(np.float32)
        yield {"image": image, "text": rng.integers(50, size=(32, 6))}


def main(optimizer=OPTIMIZER, steps=5):
    first = next(data(1))
    params = model.init(jax.random.key(0), first["image"], first["text"])["params"]
    step = crossshard.make_train_step(loss_fn, optimizer, loss_over="batch")
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
