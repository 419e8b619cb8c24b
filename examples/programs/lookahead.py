"""Lookahead: fast and slow parameters, synchronised every few steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import crossshard

OPTIMIZER = optax.adam(1e-2)


def init_params(rng):
    first, second = rng.normal(size=(8, 32)) / 3, rng.normal(size=(32, 1)) / 6
    return {"first": jnp.float32(first), "second": jnp.float32(second)}


def loss_fn(params, x, y):
    return jnp.mean(optax.l2_loss(jnp.tanh(x @ params["first"]) @ params["second"], y))


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(32, 8)).astype(np.float32)
        yield x, np.sin(x.sum(1, keepdims=True))


def main(optimizer=OPTIMIZER, steps=7):
    optimizer = optax.lookahead(optimizer, sync_period=3, slow_step_size=0.5)
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
    def train_step(params, opt_state, x, y):
        loss, grads = crossshard.value_and_grad(loss_fn)(params.fast, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    params = optax.LookaheadParams.init_synced(init_params(np.random.default_rng(1)))
    opt_state = optimizer.init(params)
    for x, y in data(steps):
        params, opt_state, loss = train_step(params, opt_state, x, y)
        print(f"loss {loss:.4f}")
    return params


if __name__ == "__main__":
    main()
