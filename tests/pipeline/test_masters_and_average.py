"""master_dtype and ema: the parameters with more bits, and their average, against numpy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.reference.pipeline_model import round_to
from tests.step.common import sgd_step

N, STEPS, RATE, DECAY = 4, 20, 0.01, 0.8
RNG = np.random.default_rng(0)
# Near 1, where 16 bits cannot hold a step of this size.
W = (1 + RNG.uniform(0, 0.5, size=(32, 40))).astype(np.float32)
X = RNG.normal(size=(STEPS, N, 32, 40)).astype(np.float32) / 20
MOMENTA = {"sgd": 0.0, "momentum": 0.9}
both = pytest.mark.parametrize("weight_update", ["replicated", "sharded"])


def loss_fn(w: Any, x: Any) -> jax.Array:
    return (w.astype(jnp.float32) * x).sum() / len(x)


def expected(dtype: str, momentum: float) -> tuple[np.ndarray, np.ndarray]:
    """The masters and the average after each step, in float64."""
    w = ema = round_to(W, dtype)
    trace, found = np.zeros_like(w), []
    for x in X:
        trace = momentum * trace + np.mean([round_to(each, dtype) for each in x], 0)
        w = w - RATE * trace
        ema = DECAY * ema + (1 - DECAY) * w
        found.append((w, ema))
    return tuple(map(np.stack, zip(*found, strict=True)))  # type: ignore[return-value]


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MOMENTA)
def test_masters_move_by_steps_that_the_parameters_cannot(
    name: str, dtype: str, weight_update: str
):
    inner = optax.sgd(RATE, momentum=MOMENTA[name] or None)
    step = make_train_step(
        loss_fn, inner, num_shards=N, weight_update=weight_update, master_dtype="float32", ema=DECAY
    )
    state = step.init(jnp.asarray(W, dtype))
    for t in range(STEPS):
        state, _ = step(state, X[t])
        assert state.params.dtype == dtype
    masters, ema = (optax.tree.get(state.opt_state, key) for key in ("masters", "ema"))
    want = expected(dtype, MOMENTA[name])
    np.testing.assert_allclose(masters, want[0][-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(ema, want[1][-1], rtol=0, atol=1e-6)
    # The parameters are the rounded masters, and nothing else.
    np.testing.assert_array_equal(state.params, np.asarray(masters).astype(state.params.dtype))
    if weight_update == "sharded":
        for each in (masters, ema):
            assert each.sharding.spec == P(("shards",))
            assert each.addressable_shards[0].data.shape == (32 // N, 40)


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_the_user_sets_is_not_undone(dtype: str, weight_update: str):
    step = sgd_step(loss_fn, RATE, N, weight_update=weight_update, master_dtype="float32")
    state = step.init(jnp.asarray(W, dtype))
    for t in range(2):
        state, _ = step(state, X[t])
    before = np.asarray(optax.tree.get(state.opt_state, "masters"))
    # Pruned, loaded from elsewhere, and left alone.
    edited = state.params.at[:8].set(0).at[8:16].set(-3)
    state, _ = step(dataclasses.replace(state, params=edited), X[2])
    gradient = np.mean([round_to(each, dtype) for each in X[2]], 0)
    start = np.concatenate([np.zeros((8, 40)), np.full((8, 40), -3), before[16:]])
    masters = np.asarray(optax.tree.get(state.opt_state, "masters"))
    np.testing.assert_allclose(masters, start - RATE * gradient, rtol=0, atol=3e-7)
    np.testing.assert_array_equal(state.params, masters.astype(state.params.dtype))


def test_parameters_that_are_nan_are_not_brought_back_by_their_masters():
    step = sgd_step(loss_fn, RATE, N, master_dtype="float32")
    state = step.init(jnp.ones(40, jnp.bfloat16))
    state = dataclasses.replace(state, params=state.params.at[0].set(jnp.nan))
    state, _ = step(state, X[0, :, 0])
    assert np.isnan(np.float32(state.params)).sum() == 1


def test_without_masters_small_steps_are_lost():
    # An eighth of a unit in the last place of 1.
    x = np.full((N, 40), 2.0**-10, np.float32)
    still = sgd_step(loss_fn, 1.0, N)
    moving = sgd_step(loss_fn, 1.0, N, master_dtype="float32")
    one = jnp.ones((40,), jnp.bfloat16)
    a, b = still.init(one), moving.init(one)
    for _ in range(16):
        (a, _), (b, _) = still(a, x), moving(b, x)
    np.testing.assert_array_equal(np.float32(a.params), np.ones(40, np.float32))
    np.testing.assert_array_equal(np.float32(b.params), np.full(40, 1 - 2.0**-6, np.float32))


@both
def test_the_average_of_float32_parameters(weight_update: str):
    step = sgd_step(loss_fn, RATE, N, weight_update=weight_update, ema=DECAY)
    state, want = step.init(W), expected("float32", 0.0)
    for t in range(STEPS):
        state, _ = step(state, X[t])
    np.testing.assert_allclose(state.params, want[0][-1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(step.model(state, ema=True), want[1][-1], rtol=0, atol=2e-6)
    # As the masters do, so that a state has room for them.
    assert optax.tree.get(step.unshard(state).opt_state, "ema").shape == W.shape


def test_the_models_average_has_the_dtype_of_the_model():
    step = sgd_step(loss_fn, RATE, N, weight_update="sharded", master_dtype="float32", ema=DECAY)
    state, _ = step(step.init(jnp.asarray(W, jnp.bfloat16)), X[0])
    model = step.model(state, ema=True)
    ema = optax.tree.get(state.opt_state, "ema")
    assert (model.dtype, ema.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(model, np.asarray(ema).astype(jnp.bfloat16))


def test_groups_have_their_own_averages():
    groups = [[0, 1], [2, 3]]
    opt = CrossShardOptimizer(optax.sgd(RATE), group_assignment=groups, ema=DECAY)
    step = make_train_step(loss_fn, opt, num_shards=N)
    state = step.init(W)
    want = np.stack([np.float64(W)] * N)
    average = want.copy()
    for t in range(3):
        state, _ = step(state, X[t])
        for group in groups:
            want[group] -= RATE * np.float64(X[t, group]).mean(0)
        average = DECAY * average + (1 - DECAY) * want
    for shard in range(N):
        found = step.model(state, shard, ema=True)
        np.testing.assert_allclose(found, average[shard], rtol=0, atol=2e-6)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_schedule_warms_the_average_up(weight_update: str, dtype: str):
    warm_up = lambda count: jnp.minimum(0.8, (1 + count) / (10 + count))
    masters = {"master_dtype": "float32"} if dtype == "bfloat16" else {}
    step = make_train_step(
        loss_fn, optax.adam(RATE), num_shards=N, weight_update=weight_update, ema=warm_up, **masters
    )
    state, wide = step.init(jnp.asarray(W, dtype)), round_to(W, dtype)
    for t in range(8):
        state, _ = step(state, X[t])
        now = optax.tree.get(step.unshard(state).opt_state, "masters", state.params)
        decay = min(0.8, (1 + t) / (10 + t))
        wide = decay * wide + (1 - decay) * np.asarray(now, np.float64)
    ema = optax.tree.get(step.unshard(state).opt_state, "ema")
    np.testing.assert_allclose(ema, wide, rtol=0, atol=2e-6)
    assert optax.tree.get(state.opt_state, "ema_count") == 8
    assert "moving average by " in step.describe()
    assert " at 0x" not in step.describe()


def test_a_schedule_in_64_bits_leaves_the_average_its_dtype():
    wide = lambda count: jnp.float64(0.5) + 0.0 * count
    with jax.enable_x64(True):
        opt = CrossShardOptimizer(optax.sgd(RATE), ema=wide)
        params = jnp.ones(3, jnp.float32)
        types = jax.eval_shape(opt.init, params)
        with crossshard.shard_context(1):
            after = jax.eval_shape(lambda g, s, p: opt.update(g, s, p)[1], params, types, params)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, types)
