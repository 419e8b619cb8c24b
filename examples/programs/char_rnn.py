"""A recurrent language model in NNX: a GRU over the bytes of a text, gradients clipped by value."""

import numpy as np
import optax
from flax import nnx

import crossshard

OPTIMIZER = optax.chain(optax.clip(0.05), optax.rmsprop(2e-3))
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 20, np.uint8)


class CharRNN(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(128, 16, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(16, 32, rngs=rngs), rngs=rngs)
        self.out = nnx.Linear(32, 128, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.rnn(self.embed(tokens)))


@crossshard.shard(num_shards=8)
def train_step(model, optimizer, inputs, targets):
    def loss_fn(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets)
        return losses.mean()

    return optimizer.minimize(lambda: loss_fn(model), var_list=model)


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(len(TEXT) - 17, size=16)
        chunk = np.stack([TEXT[i : i + 17] for i in starts]).astype(np.int32)
        yield chunk[:, :-1], chunk[:, 1:]


def main(optimizer=OPTIMIZER, steps=4):
    model = CharRNN(nnx.Rngs(0))
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    for inputs, targets in data(steps):
        loss = train_step(model, optimizer, inputs, targets)
        print(f"loss {loss.mean():.4f}")
    return nnx.state(model, nnx.Param)


if __name__ == "__main__":
    main()
