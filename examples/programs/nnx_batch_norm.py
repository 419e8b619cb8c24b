"""Image classification with batch norm and dropout in NNX: statistics and streams in the model."""

import numpy as np
import optax
from flax import nnx

import crossshard

OPTIMIZER = optax.adamw(5e-3)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.linear(self.dropout(x.mean((1, 2))))


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        label = rng.integers(10, size=32)
        image = rng.normal(size=(32, 8, 8, 3)) + label[:, None, None, None] / 5
        yield {"image": image.astype(np.float32), "label": label}


def main(optimizer=OPTIMIZER, steps=4):
    model = Network(rngs=nnx.Rngs(0))
    step = crossshard.make_train_step(loss_fn, optimizer, loss_over="batch")
    state = step.init(model)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return nnx.state(step.model(state), (nnx.Param, nnx.BatchStat))


if __name__ == "__main__":
    main()
