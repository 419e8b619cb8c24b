"""A mixture of experts, split over a mesh axis of their own, with a loss for their balance."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard

OPTIMIZER = optax.adamw(1e-3)
EXPERTS, WIDTH = 4, 16


def init_params(rng):
    normal = lambda *shape: jnp.float32(rng.normal(size=shape) / np.sqrt(shape[-2]))
    return {
        "router": normal(WIDTH, EXPERTS),
        "up": normal(EXPERTS, WIDTH, 32),
        "down": normal(EXPERTS, 32, WIDTH),
    }


SPLIT = {"router": P(), "up": P("model"), "down": P("model")}


def loss_fn(params, batch):
    x, y = batch
    probabilities = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(probabilities.argmax(-1), EXPERTS)
    gate = (chosen * probabilities).sum(-1, keepdims=True)
    hidden = jax.nn.gelu(jnp.einsum("bd,edh->beh", x, params["up"]))
    out = jnp.einsum("beh,ehd->bed", hidden, params["down"])
    out = x + gate * jnp.einsum("bed,be->bd", out, chosen)
    # As in the Switch Transformer: the share of an expert times its mean probability.
    balance = EXPERTS * jnp.sum(chosen.mean(0) * probabilities.mean(0))
    return jnp.mean((out - y) ** 2) + 0.01 * balance


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(32, WIDTH)).astype(np.float32)
        yield x, np.tanh(x[:, ::-1])


def main(optimizer=OPTIMIZER, steps=5):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = init_params(np.random.default_rng(1))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params = jax.tree.map(place, params, SPLIT)
    options = {"mesh": mesh, "axis_name": "data"}
    step = crossshard.make_train_step(loss_fn, optimizer, **options, loss_over="batch")
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
