"""One shard's overflow: what docs/guide/finiteness.md says of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step

W = np.float32([1, 2, 3])
FINE = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
OVERFLOW = FINE.copy()
OVERFLOW[5] = np.inf


def loss(w: Any, x: Any) -> jax.Array:
    return ((x @ w) ** 2).mean()


def all_finite(tree: Any) -> jax.Array:
    """What jmp.all_finite is."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def in_the_optimizer(gradients: Any, w: Any) -> Any:
    opt = CrossShardOptimizer(optax.apply_if_finite(optax.sgd(0.1), 5))
    return w + opt.update(gradients, opt.init(w), w)[0]


def on_the_updates(gradients: Any, w: Any) -> Any:
    opt = CrossShardOptimizer(optax.sgd(0.1))
    updates, _ = opt.update(gradients, opt.init(w), w)
    return jnp.where(all_finite(updates), w + updates, w)


def agreed_on(gradients: Any, w: Any) -> Any:
    opt = CrossShardOptimizer(optax.sgd(0.1))
    ok = jax.lax.pmin(all_finite(gradients).astype(int), "shards")
    updates, _ = opt.update(gradients, opt.init(w), w)
    return jnp.where(ok > 0, w + updates, w)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("way", [in_the_optimizer, on_the_updates, agreed_on])
def test_no_shard_parts_from_the_others(way: Callable[[Any, Any], Any], check_vma: bool):
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        lambda w, x: way(crossshard.grad(loss)(w, x), w)[None],
        mesh=mesh,
        in_specs=(P(), P("shards")),
        out_specs=P("shards"),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(run)(W, OVERFLOW), np.tile(W, (8, 1)))
    stepped = W - 0.1 * jax.grad(loss)(W, FINE)
    np.testing.assert_allclose(jax.jit(run)(W, FINE), np.tile(stepped, (8, 1)), rtol=1e-5)


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_a_whole_step_shows_it_and_skips(weight_update: str):
    step = make_train_step(
        loss, optax.apply_if_finite(optax.sgd(0.1), 5), num_shards=8, weight_update=weight_update
    )
    state, metrics = step(step.init(W), OVERFLOW)
    assert not np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params, W)
