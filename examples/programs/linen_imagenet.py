"""Image classification with batch norm: a ResNet, weight decay in the loss, `batch_stats`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import crossshard

OPTIMIZER = optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True)


class Block(nn.Module):
    features: int
    strides: tuple = (1, 1)

    @nn.compact
    def __call__(self, x, train):
        norm = lambda: nn.BatchNorm(use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = Block(8)(x, train)
        x = Block(16, (2, 2))(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


model = ResNet()


def loss_fn(params, batch_stats, batch):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, updates = model.apply(variables, batch["image"], mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    weight_l2 = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
    return loss + 1e-4 * 0.5 * weight_l2, updates["batch_stats"]


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        label = rng.integers(10, size=16)
        image = rng.normal(size=(16, 8, 8, 3)) + label[:, None, None, None] / 5
        yield {"image": image.astype(np.float32), "label": label}


def main(optimizer=OPTIMIZER, steps=3):
    variables = model.init(jax.random.key(0), np.ones((1, 8, 8, 3)))
    params, stats = variables["params"], variables["batch_stats"]
    step = crossshard.make_train_step(loss_fn, optimizer, model_state="mean", loss_over="batch")
    state = step.init(params, model_state=stats)
    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
