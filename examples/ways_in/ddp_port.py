"""The loop of torch_ddp.py in crossshard: the same parameters, the same rows, the same numbers."""

import json

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(4)  # on GPUs and TPUs this changes nothing

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    # 1e-2 is PyTorch's default for the weight decay; Optax's is 1e-4.
    "adamw": optax.adamw(3e-3, b2=0.95, weight_decay=1e-2),
}


def data():
    """512 rows of 16 numbers, and what to say of each."""
    x = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
    return x, np.sin(x[:, 0]) + x[:, 1] * x[:, 2] / 4


class Network(nnx.Module):
    """The same parameters; a kernel is `[in, out]`."""

    def __init__(self):
        rng = np.random.default_rng(1)
        self.hidden = nnx.Linear(16, 256, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(256, 1, rngs=nnx.Rngs(0))
        for layer in (self.hidden, self.out):
            inputs, outputs = layer.in_features, layer.out_features
            kernel = rng.normal(size=(inputs, outputs)) / inputs**0.5
            layer.kernel[...] = jnp.asarray(kernel, jnp.float32)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))[:, 0]


def loss_fn(model, batch):
    """The mean over the rows that it is given."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(optimizer, **options):
    """Two epochs of eight global batches of 64 rows."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    step = crossshard.make_train_step(loss_fn, optimizer, num_shards=4, **options)
    state = step.init(Network())
    x, y = data()

    losses = []
    for _ in range(2):
        for rows in np.split(np.arange(512), 8):
            state, metrics = step(state, {"x": x[rows], "y": y[rows]})
            losses.append(float(metrics["loss"]))

    model = step.model(state)
    arrays = [model.hidden.kernel, model.hidden.bias, model.out.kernel, model.out.bias]
    return {
        "losses": losses,
        "parameters": [np.ravel(array[...])[::61].tolist() for array in arrays],
    }


if __name__ == "__main__":
    print(json.dumps({name: train(each) for name, each in OPTIMIZERS.items()}))
