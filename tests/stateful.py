"""What tests of the stateful idiom share: steps, and whether two models are equal."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer


def sgd(rate: Any = 1.0, momentum: float | None = None, **options: Any) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.sgd(rate, momentum), **options)


def adam(rate: Any = 0.1, **options: Any) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.adam(rate), **options)


def training(loss: Callable[..., Any], number: int = 8) -> Callable[..., Any]:
    """A step ``(model, optimizer, *batch)`` on this many shards that minimizes a loss of it."""
    return crossshard.shard(num_shards=number)(
        lambda model, opt, *batch: opt.minimize(lambda: loss(model, *batch), var_list=model)
    )


def assert_same(one: Any, other: Any, **tolerances: float) -> None:
    """The same variables with equal values, or, with tolerances, with close ones."""
    ours, theirs = (jax.tree_util.tree_leaves_with_path(nnx.state(each)) for each in (one, other))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, **({"rtol": 0} | tolerances))
