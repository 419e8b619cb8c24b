"""MAML: sines of other phases, each task adapted by a gradient step within the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.adam(1e-3)
INNER_RATE = 0.1


def init_params(rng):
    sizes = [(1, 32), (32, 32), (32, 1)]
    layer = lambda i, o: (rng.normal(size=(i, o)) / np.sqrt(i), np.zeros(o))
    return [tuple(jnp.float32(x) for x in layer(*size)) for size in sizes]


def net_apply(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def mse(params, x, y):
    return jnp.mean((net_apply(params, x) - y) ** 2)


def inner_update(params, x, y):
    grads = jax.grad(mse)(params, x, y)
    return jax.tree.map(lambda p, g: p - INNER_RATE * g, params, grads)


def maml_loss(params, x1, y1, x2, y2):
    return mse(inner_update(params, x1, y1), x2, y2)


def batch_maml_loss(params, batch):
    task_losses = jax.vmap(maml_loss, in_axes=(None, 0, 0, 0, 0))(params, *batch)
    return jnp.mean(task_losses)


def tasks(steps):
    rng = np.random.default_rng(1)
    for _ in range(steps):
        amplitude = rng.uniform(0.1, 0.5, size=(16, 1, 1))
        phase = rng.uniform(0, np.pi, size=(16, 1, 1))
        x = rng.uniform(-2, 2, size=(16, 20, 1))
        x, y = np.float32(x), np.float32(amplitude * np.sin(x + phase))
        yield x[:, :10], y[:, :10], x[:, 10:], y[:, 10:]


def main(optimizer=OPTIMIZER, steps=5):
    params = init_params(np.random.default_rng(0))
    step = crossshard.make_train_step(batch_maml_loss, optimizer)
    state = step.init(params)

    for batch in tasks(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
