"""BYOL: an online network learns what a moving average of it sees in another view."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import crossshard

OPTIMIZER = optax.lars(0.1)
TAU = 0.9


@hk.without_apply_rng
@hk.transform
def network(x):
    projection = hk.nets.MLP([32, 16], name="projector")(jax.nn.relu(hk.Linear(32)(x)))
    return projection, hk.nets.MLP([32, 16], name="predictor")(projection)


def regression_loss(x, y):
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.sum((unit(x) - unit(y)) ** 2, axis=-1)


def loss_fn(params, target_params, view1, view2):
    (_, online1), (_, online2) = network.apply(params, view1), network.apply(params, view2)
    target1, _ = network.apply(target_params, view1)
    target2, _ = network.apply(target_params, view2)
    losses = regression_loss(online1, jax.lax.stop_gradient(target2))
    return jnp.mean(losses + regression_loss(online2, jax.lax.stop_gradient(target1)))


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(32, 12))
        views = x * rng.uniform(0.5, 1.5, size=(2, 32, 1)) + 0.1 * rng.normal(size=(2, 32, 12))
        yield views.astype(np.float32)


def main(optimizer=OPTIMIZER, steps=5):
    params = target_params = network.init(jax.random.key(0), np.ones((1, 12), np.float32))
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    opt_state = optimizer.init(params)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P(), P("data"), P("data")), out_specs=P())
    def update_fn(params, target_params, opt_state, view1, view2):
        loss, grads = crossshard.value_and_grad(loss_fn)(params, target_params, view1, view2)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        target_params = optax.incremental_update(params, target_params, 1 - TAU)
        return params, target_params, opt_state, jax.lax.pmean(loss, "data")

    for views in data(steps):
        params, target_params, opt_state, loss = update_fn(params, target_params, opt_state, *views)
        print(f"loss {loss:.4f}")
    return params, target_params


if __name__ == "__main__":
    main()
