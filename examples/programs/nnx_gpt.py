"""A small GPT in NNX: gradients clipped by their norm, no weight decay on vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(6e-4, b2=0.95, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
)
VOCABULARY, LENGTH, WIDTH = 32, 16, 32


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln_1, self.ln_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.c_attn = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.c_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.c_fc = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.mlp_proj = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        heads = lambda x: x.reshape(*x.shape[:2], 4, WIDTH // 4)
        q, k, v = map(heads, jnp.split(self.c_attn(self.ln_1(x)), 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.reshape(x.shape))
        return x + self.mlp_proj(nnx.gelu(self.c_fc(self.ln_2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.wte = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.wpe = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.ln_f = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, idx):
        x = self.wte(idx) + self.wpe(jnp.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.wte.attend(self.ln_f(x))  # tied weights


def loss_fn(model, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def data(steps):
    rng = np.random.default_rng(0)
    text = rng.integers(VOCABULARY, size=1000)
    for _ in range(steps):
        start = rng.integers(1000 - LENGTH - 1, size=16)
        chunk = np.stack([text[i : i + LENGTH + 1] for i in start])
        yield chunk[:, :-1], chunk[:, 1:]


def main(optimizer=OPTIMIZER, steps=4):
    model = GPT(rngs=nnx.Rngs(0))
    step = crossshard.make_train_step(loss_fn, optimizer)
    state = step.init(model)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return nnx.state(step.model(state))


if __name__ == "__main__":
    main()
