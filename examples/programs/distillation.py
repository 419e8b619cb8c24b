"""Distillation: a student learns the softened outputs of a teacher, and the labels."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.lion(1e-3)
TEMPERATURE, ALPHA = 4.0, 0.7
teacher = eqx.nn.MLP(12, 5, 64, 2, key=jax.random.key(1))  # trained, in practice


def loss_fn(student, batch):
    x, y = batch
    scores, goal = jax.vmap(student)(x), jax.vmap(teacher)(x)
    soft = optax.losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(scores / TEMPERATURE), jax.nn.log_softmax(goal / TEMPERATURE)
    )
    hard = optax.softmax_cross_entropy_with_integer_labels(scores, y)
    return jnp.mean(ALPHA * TEMPERATURE**2 * soft + (1 - ALPHA) * hard)


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield rng.normal(size=(32, 12)).astype(np.float32), rng.integers(5, size=32)


def main(optimizer=OPTIMIZER, steps=5):
    model = eqx.nn.MLP(12, 5, 16, 1, key=jax.random.key(0))
    step = crossshard.make_train_step(loss_fn, optimizer)
    state = step.init(model)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return eqx.filter(step.model(state), eqx.is_array)


if __name__ == "__main__":
    main()
