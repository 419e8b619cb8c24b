"""LoRA on a frozen base: `wrt` chooses what is trained; nothing else is differentiated or sent."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.adam(1e-2)


class Network(nnx.Module):
    """Two layers with an adapter of low rank each (Hu et al. 2021, arXiv 2106.09685)."""

    def __init__(self, rngs):
        self.hidden = nnx.LoRALinear(1, 64, lora_rank=1, rngs=rngs)
        self.out = nnx.LoRALinear(64, 1, lora_rank=1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def data():
    """256 numbers and their sines."""
    x = np.random.default_rng(0).uniform(-2, 2, size=(256, 1))
    return {"x": x, "y": np.sin(x)}


def loss_fn(model, batch):
    """The mean squared error on one shard's part of the batch."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def error(model, batch):
    """The absolute error of each example."""
    return abs(model(batch["x"]) - batch["y"])[:, 0]


def main(optimizer=OPTIMIZER, steps=100):
    """Train the adapters, and return the model."""
    step = crossshard.make_train_step(loss_fn, optimizer, wrt=nnx.LoRAParam)
    state = step.init(Network(nnx.Rngs(0)))  # a base that was trained before, in practice
    batch = data()
    for number in range(steps):
        state, metrics = step(state, batch)
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:2}   loss {metrics['loss']:.5f}")
    print(step.describe())
    print(f"mean error {step.evaluate(state, [batch], error):.3f}")
    return step.model(state)


if __name__ == "__main__":
    main()
