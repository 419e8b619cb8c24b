"""Image classification in NNX: `nnx.jit`, `nnx.value_and_grad` and `nnx.Optimizer`."""

import numpy as np
import optax
from flax import nnx

import crossshard

OPTIMIZER = optax.adamw(5e-3, 0.9)


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.linear1 = nnx.Linear(128, 32, rngs=rngs)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.conv(x)), window_shape=(2, 2), strides=(2, 2))
        x = nnx.relu(self.linear1(x.reshape(x.shape[0], -1)))
        return self.linear2(x)


def loss_fn(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


@crossshard.shard(num_shards=8)
def train_step(model, optimizer, batch):
    loss = lambda: loss_fn(model, batch)[0]
    pairs = optimizer.compute_gradients(loss, var_list=model)
    optimizer.apply_gradients(pairs)
    return optimizer.loss


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        label = rng.integers(10, size=32)
        image = rng.normal(size=(32, 8, 8, 1)) + label[:, None, None, None] / 5
        yield {"image": image.astype(np.float32), "label": label}


def main(optimizer=OPTIMIZER, steps=5):
    model = CNN(rngs=nnx.Rngs(0))
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    for batch in data(steps):
        loss = train_step(model, optimizer, batch)
        print(f"loss {loss.mean():.4f}")
    return nnx.state(model)


if __name__ == "__main__":
    main()
