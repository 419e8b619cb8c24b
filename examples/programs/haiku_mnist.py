"""Image classification in Haiku, with a moving average of the parameters to evaluate with."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.adam(1e-3)


@hk.without_apply_rng
@hk.transform
def network(images):
    mlp = hk.Sequential(
        [hk.Flatten(), hk.Linear(64), jax.nn.relu, hk.Linear(32), jax.nn.relu, hk.Linear(10)]
    )
    return mlp(images)


def loss_fn(params, batch):
    logits = network.apply(params, batch["image"])
    l2_regulariser = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    labels = jax.nn.one_hot(batch["label"], 10)
    log_likelihood = jnp.sum(labels * jax.nn.log_softmax(logits))
    return -log_likelihood / batch["label"].shape[0] + 1e-4 * l2_regulariser


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        label = rng.integers(10, size=32)
        image = rng.normal(size=(32, 8, 8, 1)) + label[:, None, None, None] / 5
        yield {"image": image.astype(np.float32), "label": label}


def main(optimizer=OPTIMIZER, steps=5):
    params = network.init(jax.random.key(0), np.ones((1, 8, 8, 1)))
    step = crossshard.make_train_step(loss_fn, optimizer, ema=0.999)
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state), step.model(state, ema=True)


if __name__ == "__main__":
    main()
