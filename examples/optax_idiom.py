"""The Optax idiom: your own training loop with `jax.shard_map`, its optimizer wrapped.

`CrossShardOptimizer` is an Optax transformation. Take gradients with `crossshard.value_and_grad`,
wrap the optimizer, and leave the rest of the step as it is on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.adamw(1e-2)


def data():
    """512 points of the plane, and the height of a hill at each."""
    x = np.random.default_rng(0).uniform(-2, 2, size=(512, 2))
    return x, np.exp(-(x**2).sum(axis=1))


def initial_params():
    """A network with one hidden layer."""
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 32)), rng.normal(size=32) / 32
    return {"first": first, "bias": np.zeros(32), "second": second}


def loss_fn(params, x, y):
    """The mean squared error on these rows."""
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["second"] - y) ** 2)


def main(optimizer=OPTIMIZER, steps=100):
    """Train, and return the parameters."""
    opt = crossshard.CrossShardOptimizer(optimizer)
    mesh = jax.make_mesh((jax.device_count(),), ("shards",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("shards"), P("shards")), out_specs=P())
    def step(params, state, x, y):
        # Each shard has its own rows, so it has its own loss and its own gradients.
        loss, grads = crossshard.value_and_grad(loss_fn)(params, x, y)
        # update averages the gradients over the shards, so every shard takes the same step.
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "shards")

    # Each shard has its rows.
    x, y = jax.device_put(data(), NamedSharding(mesh, P("shards")))
    params = initial_params()
    state = opt.init(params)
    for number in range(steps):
        params, state, loss = step(params, state, x, y)
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:2}   loss {loss:.5f}")
    print(f"trained on {jax.device_count()} shards with {len(x) // mesh.size} rows each")
    return params


if __name__ == "__main__":
    main()
