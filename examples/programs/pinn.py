"""A physics-informed network: residuals at inner points, and values at points of the boundary."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import crossshard

OPTIMIZER = optax.adam(1e-3)


def loss_fn(model, inner, boundary):
    u = lambda point: model(point)[0]
    laplacian = lambda point: jnp.trace(jax.hessian(u)(point))
    source = -2 * jnp.pi**2 * jnp.sin(jnp.pi * inner[:, 0]) * jnp.sin(jnp.pi * inner[:, 1])
    residual = jax.vmap(laplacian)(inner) - source
    return jnp.mean(residual**2) + 10 * jnp.mean(jax.vmap(u)(boundary) ** 2)


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        inner, boundary = rng.uniform(size=(32, 2)), rng.uniform(size=(16, 2))
        boundary[np.arange(16), rng.integers(2, size=16)] = rng.integers(2, size=16)
        yield np.float32(inner), np.float32(boundary)


def main(optimizer=OPTIMIZER, steps=4):
    model = eqx.nn.MLP(2, 1, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, static = eqx.partition(model, eqx.is_array)
    opt_state = optimizer.init(params)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
    def train_step(params, opt_state, inner, boundary):
        of_params = lambda params: loss_fn(eqx.combine(params, static), inner, boundary)
        grads = crossshard.grad(of_params)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    for inner, boundary in data(steps):
        params, opt_state = train_step(params, opt_state, inner, boundary)
    return params


if __name__ == "__main__":
    main()
