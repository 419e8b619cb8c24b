"""LoRA in NNX: adapters of low rank are trained, the base is frozen."""

import numpy as np
import optax
from flax import nnx

import crossshard

OPTIMIZER = optax.adamw(1e-2)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.hidden = nnx.LoRALinear(16, 32, lora_rank=2, rngs=rngs)
        self.out = nnx.LoRALinear(32, 4, lora_rank=2, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens).mean(1)
        return self.out(nnx.gelu(self.hidden(x)))


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield {"tokens": rng.integers(32, size=(32, 6)), "label": rng.integers(4, size=32)}


def main(optimizer=OPTIMIZER, steps=5):
    model = Network(nnx.Rngs(0))  # pretrained, in practice
    step = crossshard.make_train_step(loss_fn, optimizer, wrt=nnx.LoRAParam)
    state = step.init(model)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return nnx.state(step.model(state), nnx.Param)


if __name__ == "__main__":
    main()
