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


def in_the_optimizer(gradients: Any, w: Any) -> Any:
    opt = CrossShardOptimizer(optax.apply_if_finite(optax.sgd(0.1), 5))
    return w + opt.update(gradients, opt.init(w), w)[0]


def on_the_updates(gradients: Any, w: Any) -> Any:
    opt = CrossShardOptimizer(optax.sgd(0.1))
    updates, _ = opt.update(gradients, opt.init(w), w)
    return jnp.where(jnp.isfinite(updates).all(), w + updates, w)


def agreed_on(gradients: Any, w: Any) -> Any:
    opt = CrossShardOptimizer(optax.sgd(0.1))
    ok = jax.lax.pmin(jnp.isfinite(gradients).all().astype(int), "shards")
    updates, _ = opt.update(gradients, opt.init(w), w)
    return jnp.where(ok > 0, w + updates, w)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("way", [in_the_optimizer, on_the_updates, agreed_on])
def test_no_shard_parts_from_the_others(way: Callable[[Any, Any], Any], check_vma: bool):
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(AxisType.Auto,))
    step = lambda w, x: way(crossshard.grad(loss)(w, x), w)[None]
    how: Any = {"in_specs": (P(), P("shards")), "out_specs": P("shards"), "check_vma": check_vma}
    run = jax.jit(jax.shard_map(step, mesh=mesh, **how))
    np.testing.assert_array_equal(run(W, OVERFLOW), [W] * 8)
    stepped = W - 0.1 * jax.grad(loss)(W, FINE)
    np.testing.assert_allclose(run(W, FINE), [stepped] * 8, rtol=1e-5)


def test_a_whole_step_shows_it_and_skips():
    step = make_train_step(loss, optax.apply_if_finite(optax.sgd(0.1), 5), num_shards=8)
    state, metrics = step(step.init(W), OVERFLOW)
    assert not np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params, W)
