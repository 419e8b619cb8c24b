"""Per-example gradients: reduced only once each shard has aggregated its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentError

SHARDS, ROWS, CLIP = 4, 3, 0.5
X = np.random.default_rng(0).normal(size=(SHARDS, ROWS, 5)).astype(np.float32)
W = np.float32([1, -1, 0.5, 2, 0.3])
# Without noise, what is left can be done by hand.
AGGREGATE = contrib.differentially_private_aggregate(CLIP, 0.0, 0)
both = pytest.mark.parametrize("params", [W, None], ids=["params", "no params"])


def updates(opt: Any, params: Any, x: Any) -> Any:
    """A shard's updates from the gradient of each of its examples."""
    gradients = jax.vmap(jax.grad(lambda w, x: (w @ x) ** 2), (None, 0))(W, x)
    return opt.update(gradients, opt.init(W), params)[0]


def on_shards(opt: CrossShardOptimizer, params: Any) -> np.ndarray:
    return np.asarray(jax.vmap(lambda x: updates(opt, params, x), axis_name="shards")(X))


@both
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_they_are_refused_where_the_optimizer_aggregates_them(params: Any, reduction: str):
    opt = CrossShardOptimizer(optax.chain(AGGREGATE, optax.sgd(1.0)), reduction)
    words = r"shape \(3, 5\) and its .* \(5,\).*per-example.*preprocess=optax.*its own"
    with pytest.raises(ArgumentError, match=words):
        on_shards(opt, params)


@both
def test_a_preprocessor_aggregates_them_and_one_shard_takes_them_itself(params: Any):
    x = X.reshape(-1, 5).astype(np.float64)
    each = 2 * (x @ W)[:, None] * x
    clipped = each * np.minimum(1, CLIP / np.linalg.norm(each, axis=1))[:, None]
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=AGGREGATE)
    np.testing.assert_allclose(on_shards(opt, params), [-clipped.mean(0)] * SHARDS, rtol=1e-5)
    tx = optax.chain(contrib.differentially_private_aggregate(CLIP, 1.1, 0), optax.sgd(1.0))
    got, want = (
        jax.jit(lambda x, opt=opt: updates(opt, params, x))(X[0])
        for opt in (CrossShardOptimizer(tx), tx)
    )
    np.testing.assert_array_equal(got, want)


def test_updates_of_the_gradients_shapes_are_taken_without_params():
    opt = CrossShardOptimizer(optax.masked(optax.sgd(1.0), {"a": True, "b": False}))
    gradients = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    run = lambda g: opt.update(g, opt.init(g))[0]
    got = jax.vmap(run, axis_name="shards", axis_size=2, in_axes=None)(gradients)
    np.testing.assert_array_equal(got["a"], -np.ones((2, 3)))
