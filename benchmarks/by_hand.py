"""Steps as one would write them by hand with JAX and Optax, lowered from shapes only."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from benchmarks.problem import adamw

AXIS = "shards"


def replicated(
    mesh: Mesh, params: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any
) -> jax.stages.Lowered:
    """All-reduce the gradients, update on every shard."""
    optimizer = adamw()

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = lax.pmean(jax.grad(loss_fn)(params, batch), AXIS)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    return _lowered(mesh, step, params, state, PartitionSpec(), batch)


def sharded(
    mesh: Mesh, params: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any
) -> jax.stages.Lowered:
    """Scatter each flat gradient over the shards, update a slice, gather the parameters."""
    optimizer, number = adamw(), mesh.size

    def rows(x: Any) -> Any:
        flat = jnp.ravel(x)
        return jnp.pad(flat, (0, -flat.size % number))

    def part(x: Any) -> Any:
        own = rows(x).size // number
        return lax.dynamic_slice_in_dim(rows(x), lax.axis_index(AXIS) * own, own)

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, batch)
        scattered = jax.tree.map(
            lambda g: lax.psum_scatter(rows(g), AXIS, tiled=True) / number, gradients
        )
        own = jax.tree.map(part, params)
        updates, state = optimizer.update(scattered, state, own)
        own = optax.apply_updates(own, updates)
        whole = jax.tree.map(
            lambda x, p: lax.all_gather(x, AXIS, tiled=True)[: p.size].reshape(p.shape),
            own,
            params,
        )
        return whole, state

    padded = jax.tree.map(lambda p: jax.eval_shape(rows, p), params)
    state = jax.eval_shape(optimizer.init, padded)
    specs = jax.tree.map(lambda x: PartitionSpec(AXIS) if x.ndim else PartitionSpec(), state)
    return _lowered(mesh, step, params, state, specs, batch)


def _lowered(
    mesh: Mesh, step: Callable[..., Any], params: Any, state: Any, specs: Any, batch: Any
) -> jax.stages.Lowered:
    whole, each = PartitionSpec(), PartitionSpec(AXIS)
    run = jax.shard_map(
        step, mesh=mesh, in_specs=(whole, specs, each), out_specs=(whole, specs), check_vma=False
    )
    return jax.jit(run, donate_argnums=(0, 1)).lower(params, state, batch)
