"""16 bits: each shard rounds once, sums have 32 bits; against numpy, in bytes."""

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
RNG = np.random.default_rng(0)
W = RNG.normal(size=(64, 40)).astype(np.float32)
# The gradient of a shard, times a power of two that differs between shards.
G = (RNG.normal(size=(N, 64, 40)) * 2.0 ** RNG.integers(-3, 3, size=(N, 1, 1))).astype(np.float32)


def loss_fn(params: Any, g: Any) -> jax.Array:
    return (params["w"] * g.mean(0)).sum() + 1 / 3


@pytest.mark.parametrize("way", ["step, replicated", "step, sharded", "update, types", "vmap"])
def test_each_shard_rounds_once_and_sums_have_32_bits(way: str):
    opt = CrossShardOptimizer(optax.sgd(1.0), reduce_dtype=jnp.bfloat16)
    ((params, metrics),) = trained(way, opt, loss_fn, {"w": 0 * W}, [G[:, None]], number=N)
    total = sum(map(to_bfloat16, G))
    # A sum that every shard gets whole is sent once more.
    want = (total if way in ("step, sharded", "vmap") else to_bfloat16(total)) / N
    got = -np.float64(params["w"])
    np.testing.assert_allclose(got, [want] * N, rtol=1e-6, atol=1e-6)
    assert np.abs(got - np.float64(G).mean(0)).max() > 1e-3
    if metrics:
        # The loss is none of the gradients.
        np.testing.assert_allclose(metrics["loss"], 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("way", ["update, types", "variables, minimize", "step, replicated"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_small_gradient_of_16_bits_is_not_lost(way: str, dtype: str):
    # An eighth of these is nothing in float16, whose smallest number is 2**-24.
    rows = np.float32(RNG.integers(-7, 8, size=(N, 1, 1024)) * 2.0**-22)
    loss = lambda params, x: (params["w"] * x.astype(dtype).mean(0)).sum()
    opt, params = CrossShardOptimizer(optax.sgd(1.0)), {"w": jnp.zeros(1024, dtype)}
    ((got, _),) = trained(way, opt, loss, params, [rows], number=N)
    want = -np.float64(rows[:, 0].mean(0))
    assert (want != 0).mean() > 0.8
    bits = jnp.finfo(dtype).nmant
    np.testing.assert_allclose(np.float64(got["w"][0]), want, rtol=2.0**-bits, atol=2.0**-25)


@pytest.mark.parametrize(
    ("weight_update", "whole", "half"),
    # (N − 1)/N of the gradients, and of the parameters in 32 bits, or of the sums.
    [("replicated", 2, 1), ("sharded", 2, 1.5)],
)
def test_half_of_the_gradients_are_sent(weight_update: str, whole: float, half: float):
    for dtype, times in ((None, whole), ("bfloat16", half)):
        step = sgd_step(loss_fn, 1.0, N, weight_update=weight_update, reduce_dtype=dtype)
        report = crossshard.inspect(step.lower(step.init({"w": W}), G), {"w": W})
        assert report.bytes_sent == pytest.approx(times * 7 / 8 * W.nbytes, rel=0.01)
