"""reduce_dtype: gradients over a bfloat16 wire, against numpy and in bytes."""

import functools
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
from tests.reference.pipeline_model import to_bfloat16

N = 8
GROUPS = [[0, 3, 5, 6], [1, 2, 4, 7]]
RNG = np.random.default_rng(0)
W = RNG.normal(size=(64, 40)).astype(np.float32)
# The gradient of a shard, times a power of two that differs between shards.
G = (RNG.normal(size=(N, 64, 40)) * 2.0 ** RNG.integers(-3, 3, size=(N, 1, 1))).astype(np.float32)


def loss_fn(w: Any, g: Any) -> jax.Array:
    return (w * g[0]).sum() + 1 / 3


def stepped(weight_update: str, **options: Any) -> Any:
    opt = CrossShardOptimizer(optax.sgd(1.0), **options)
    step = make_train_step(loss_fn, opt, num_shards=N, weight_update=weight_update)
    state, metrics = step(step.init(np.zeros_like(W)), G)
    return -np.float64(state.params), metrics


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_each_shard_rounds_once_and_sums_have_32_bits(weight_update: str, reduction: str):
    divisor = N if reduction == "mean" else 1
    total = sum(to_bfloat16(g) for g in G)
    # A sum that every shard gets whole is sent once more.
    want = (total if weight_update == "sharded" else to_bfloat16(total)) / divisor
    got, metrics = stepped(weight_update, reduction=reduction, reduce_dtype="bfloat16")
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    exact = np.float64(G).sum(0) / divisor
    assert np.abs(got - exact).max() > 1e-3
    # The loss is none of the gradients.
    np.testing.assert_allclose(metrics["loss"], (1 / 3) * N / divisor, rtol=1e-6)


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_in_groups(weight_update: str):
    got, _ = stepped(weight_update, group_assignment=GROUPS, reduce_dtype=jnp.bfloat16)
    for group in GROUPS:
        total = sum(to_bfloat16(G[shard]) for shard in group)
        want = (total if weight_update == "sharded" else to_bfloat16(total)) / len(group)
        for shard in group:
            np.testing.assert_allclose(got[shard], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_ones_own_shard_map(check_vma: bool):
    opt = CrossShardOptimizer(optax.sgd(1.0), reduce_dtype="bfloat16")
    mesh = jax.make_mesh((N,), ("shards",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("shards"), out_specs=P(), check_vma=check_vma
    )
    def update(g: Any) -> Any:
        return opt.update(g[0], opt.init(g[0]))[0]

    total = to_bfloat16(sum(to_bfloat16(g) for g in G))
    np.testing.assert_allclose(-np.float64(update(G)), total / N, rtol=1e-6)


def test_under_vmap_each_shard_rounds_too():
    opt = CrossShardOptimizer(optax.sgd(1.0), reduce_dtype="bfloat16")
    run = jax.vmap(lambda g: opt.update(g, opt.init(g))[0], axis_name="shards")
    total = sum(to_bfloat16(g) for g in G)
    np.testing.assert_allclose(-np.float64(run(G))[3], total / N, rtol=1e-6, atol=1e-6)


def test_a_replicated_step_sends_half():
    def sent(**options: Any) -> Any:
        step = make_train_step(
            loss_fn, optax.sgd(1.0), num_shards=N, weight_update="replicated", **options
        )
        return crossshard.inspect(step.lower(step.init(W), G), W).bytes_sent

    assert sent(reduce_dtype="bfloat16") == pytest.approx(sent() / 2, rel=0.01)


def test_a_sharded_step_scatters_half_and_gathers_the_same():
    def sent(**options: Any) -> Any:
        step = make_train_step(
            loss_fn, optax.sgd(1.0), num_shards=N, weight_update="sharded", **options
        )
        return crossshard.inspect(step.lower(step.init(W), G), W).bytes_sent

    # (N − 1)/N of the gradients in 16 bits, and of the parameters in 32.
    assert sent() == pytest.approx(2 * 7 / 8 * W.nbytes, rel=0.01)
    assert sent(reduce_dtype="bfloat16") == pytest.approx(1.5 * 7 / 8 * W.nbytes, rel=0.01)


@pytest.mark.parametrize("bad", ["float16", "int8", "bfloat", 16, "float64", "float8_e4m3fn"])
def test_what_is_no_wire_is_refused(bad: Any):
    with pytest.raises(crossshard.errors.ArgumentError, match="reduce_dtype must be bfloat16"):
        CrossShardOptimizer(optax.sgd(1.0), reduce_dtype=bad)
    with pytest.raises(crossshard.errors.ArgumentError, match="reduce_dtype must be bfloat16"):
        make_train_step(loss_fn, optax.sgd(1.0), num_shards=N, reduce_dtype=bad)
