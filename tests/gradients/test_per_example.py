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
aggregate = lambda: contrib.differentially_private_aggregate(CLIP, 0.0, 0)


def updates(opt: CrossShardOptimizer, params: Any) -> np.ndarray:
    """``[shards, …]``: each shard's updates from the gradient of each of its examples."""

    def of_shard(x: Any) -> Any:
        gradients = jax.vmap(jax.grad(lambda w, x: (w @ x) ** 2), (None, 0))(W, x)
        return opt.update(gradients, opt.init(W), params)[0]

    return np.asarray(jax.vmap(of_shard, axis_name="shards")(X))


@pytest.mark.parametrize("params", [W, None], ids=["params", "no params"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_they_are_refused_where_the_optimizer_aggregates_them(params: Any, reduction: str):
    opt = CrossShardOptimizer(optax.chain(aggregate(), optax.sgd(1.0)), reduction)
    with pytest.raises(
        ArgumentError,
        match=r"shape \(3, 5\) and its .* \(5,\).*per-example.*preprocess=optax.*its own",
    ):
        updates(opt, params)


@pytest.mark.parametrize("params", [W, None], ids=["params", "no params"])
def test_a_preprocessor_aggregates_them(params: Any):
    x = X.reshape(-1, 5).astype(np.float64)
    each = 2 * (x @ W)[:, None] * x
    clipped = each * np.minimum(1, CLIP / np.linalg.norm(each, axis=1))[:, None]
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=aggregate())
    expected = np.tile(-clipped.mean(0), (SHARDS, 1))
    np.testing.assert_allclose(updates(opt, params), expected, rtol=1e-5)


@pytest.mark.parametrize("params", [W, None], ids=["params", "no params"])
def test_where_nothing_is_reduced_the_optimizer_takes_them_itself(params: Any):
    tx = optax.chain(contrib.differentially_private_aggregate(CLIP, 1.1, 0), optax.sgd(1.0))
    gradients = jax.vmap(jax.grad(lambda w, x: (w @ x) ** 2), (None, 0))(W, X[0])

    def step(opt: Any) -> Any:
        return jax.jit(lambda g: opt.update(g, opt.init(W), params)[0])(gradients)

    np.testing.assert_array_equal(step(CrossShardOptimizer(tx)), step(tx))


def test_updates_of_the_gradients_shapes_are_taken_without_params():
    opt = CrossShardOptimizer(optax.masked(optax.sgd(1.0), {"a": True, "b": False}))
    gradients = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    run = lambda g: opt.update(g, opt.init(g))[0]
    got = jax.vmap(run, axis_name="shards", axis_size=2, in_axes=None)(gradients)
    np.testing.assert_array_equal(got["a"], -np.ones((2, 3)))
