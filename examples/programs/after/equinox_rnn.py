"""A recurrent network in Equinox: a GRU in a `lax.scan` says which way a spiral turns."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.adam(3e-3)


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, 16, key=one)
        self.linear = eqx.nn.Linear(16, 1, use_bias=False, key=two)
        self.bias = jnp.zeros(1)

    def __call__(self, xs):
        def f(carry, x):
            return self.cell(x, carry), None

        out, _ = jax.lax.scan(f, jnp.zeros(self.cell.hidden_size), xs)
        return jax.nn.sigmoid(self.linear(out) + self.bias)[0]


def compute_loss(model, batch):
    x, y = batch
    pred_y = jax.vmap(model)(x)
    return -jnp.mean(y * jnp.log(pred_y) + (1 - y) * jnp.log(1 - pred_y))


def data(steps):
    rng = np.random.default_rng(0)
    t = np.linspace(0, 4 * np.pi, 16)
    for _ in range(steps):
        sign, phase = rng.choice([-1, 1], size=(32, 1)), rng.uniform(0, 2 * np.pi, size=(32, 1))
        angle = sign * t + phase
        spiral = np.stack([np.sin(angle), np.cos(angle)], -1) / (1 + t)[:, None]
        yield spiral.astype(np.float32), (sign[:, 0] > 0).astype(np.float32)


def main(optimizer=OPTIMIZER, steps=5):
    model = RNN(jax.random.key(0))
    step = crossshard.make_train_step(compute_loss, optimizer)
    state = step.init(model)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return eqx.filter(step.model(state), eqx.is_inexact_array)


if __name__ == "__main__":
    main()
