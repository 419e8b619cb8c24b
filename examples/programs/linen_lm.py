"""A language model: a causal transformer on padded texts, the loss a mean over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import crossshard

OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 10, 100), b2=0.98)
VOCABULARY, LENGTH, WIDTH = 32, 12, 32


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(y, y, mask=mask)
        y = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(y)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        x = nn.Embed(VOCABULARY, WIDTH)(inputs)
        x = x + nn.Embed(LENGTH, WIDTH)(jnp.arange(inputs.shape[1]))
        mask = nn.combine_masks(nn.make_causal_mask(inputs), nn.make_attention_mask(inputs, inputs))
        for _ in range(2):
            x = Layer()(x, mask)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


model = Transformer()


def compute_weighted_cross_entropy(logits, targets, weights):
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (loss * weights).sum(), weights.sum()


def loss_fn(params, batch):
    inputs = jnp.pad(batch["inputs"], ((0, 0), (1, 0)))[:, :-1]  # shifted right
    logits = model.apply({"params": params}, inputs)
    weights = jnp.where(batch["inputs"] > 0, 1, 0).astype(jnp.float32)
    total, count = compute_weighted_cross_entropy(logits, batch["inputs"], weights)
    return crossshard.Mean(total, count)


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        length = rng.integers(2, LENGTH, size=(16, 1))
        texts = rng.integers(1, VOCABULARY, size=(16, LENGTH))
        yield {"inputs": np.where(np.arange(LENGTH) < length, texts, 0)}


def main(optimizer=OPTIMIZER, steps=4):
    params = model.init(jax.random.key(0), np.ones((1, LENGTH), int))["params"]
    step = crossshard.make_train_step(loss_fn, optimizer)
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
