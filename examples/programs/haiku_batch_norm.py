"""Image classification with batch norm in Haiku: `transform_with_state`."""

import haiku as hk
import jax
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.sgd(0.05, momentum=0.9)


@hk.transform_with_state
def network(images, is_training):
    norm = lambda: hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
    x = hk.Conv2D(8, kernel_shape=3, with_bias=False)(images)
    x = jax.nn.relu(norm()(x, is_training))
    x = hk.Conv2D(16, kernel_shape=3, stride=2, with_bias=False)(x)
    x = jax.nn.relu(norm()(x, is_training))
    return hk.Linear(10)(x.mean((1, 2)))


def loss_fn(params, state, batch):
    logits, state = network.apply(params, state, None, batch["images"], is_training=True)
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 10), 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean(), state


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        labels = rng.integers(10, size=16)
        images = rng.normal(size=(16, 8, 8, 3)) + labels[:, None, None, None] / 5
        yield {"images": images.astype(np.float32), "labels": labels}


def main(optimizer=OPTIMIZER, steps=4):
    first = next(data(1))["images"]
    params, state = network.init(jax.random.key(0), first, is_training=True)
    step = crossshard.make_train_step(loss_fn, optimizer, model_state="mean", loss_over="batch")
    state = step.init(params, model_state=state)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
