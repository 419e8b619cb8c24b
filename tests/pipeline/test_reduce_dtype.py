"""reduce_dtype: gradients over a bfloat16 wire, against numpy and in bytes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer
from tests.pipeline.ways import trained
from tests.reference.pipeline_model import to_bfloat16
from tests.step.common import sgd_step

N = 8
GROUPS = [[0, 3, 5, 6], [1, 2, 4, 7]]
RNG = np.random.default_rng(0)
W = RNG.normal(size=(64, 40)).astype(np.float32)
# The gradient of a shard, times a power of two that differs between shards.
G = (RNG.normal(size=(N, 64, 40)) * 2.0 ** RNG.integers(-3, 3, size=(N, 1, 1))).astype(np.float32)


def loss_fn(params: Any, g: Any) -> jax.Array:
    return (params["w"] * g.mean(0)).sum() + 1 / 3


@pytest.mark.parametrize(
    ("way", "reduction", "grouped"),
    [
        *itertools.product(["step, replicated", "step, sharded"], ["mean", "sum"], [False]),
        *itertools.product(["step, replicated", "step, sharded"], ["mean"], [True]),
        *itertools.product(["update, types", "update, no types", "vmap"], ["mean"], [False]),
    ],
)
def test_each_shard_rounds_once_and_sums_have_32_bits(way: str, reduction: str, grouped: bool):
    groups = GROUPS if grouped else None
    opt = CrossShardOptimizer(
        optax.sgd(1.0), reduction, group_assignment=groups, reduce_dtype=jnp.bfloat16
    )
    ((params, metrics),) = trained(
        way, opt, loss_fn, {"w": np.zeros_like(W)}, [G[:, None]], number=N
    )
    for group in groups or [[*range(N)]]:
        divisor = len(group) if reduction == "mean" else 1
        total = sum(to_bfloat16(G[shard]) for shard in group)
        # A sum that every shard gets whole is sent once more.
        want = (total if way in ("step, sharded", "vmap") else to_bfloat16(total)) / divisor
        atol = 0 if way.startswith("update") else 1e-6
        for shard in group:
            got = -np.float64(params["w"][shard])
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=atol)
            assert np.abs(got - np.float64(G[group]).sum(0) / divisor).max() > 1e-3
    if metrics and not grouped:
        # The loss is none of the gradients.
        np.testing.assert_allclose(metrics["loss"], (1 / 3) * N / divisor, rtol=1e-6)


@pytest.mark.parametrize(
    ("weight_update", "whole", "half"),
    # (N − 1)/N of the gradients, and of the parameters in 32 bits, or of the sums.
    [("replicated", 2, 1), ("sharded", 2, 1.5)],
)
def test_half_of_the_gradients_are_sent(weight_update: str, whole: float, half: float):
    def sent(**options: Any) -> Any:
        step = sgd_step(loss_fn, 1.0, N, weight_update=weight_update, **options)
        return crossshard.inspect(step.lower(step.init({"w": W}), G), {"w": W}).bytes_sent

    assert sent() == pytest.approx(whole * 7 / 8 * W.nbytes, rel=0.01)
    assert sent(reduce_dtype="bfloat16") == pytest.approx(half * 7 / 8 * W.nbytes, rel=0.01)
