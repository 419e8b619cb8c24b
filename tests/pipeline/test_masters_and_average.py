"""master_dtype and ema: parameters that are set, the model's average, and schedules.

That masters move by what the parameters cannot hold, and what the average is, with groups and
without, hold the combinations, by their factors `precision` and `ema`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError
from tests.reference.pipeline_model import round_to
from tests.step.common import sgd_step, train

N, RATE, DECAY = 4, 0.01, 0.8
RNG = np.random.default_rng(0)
# Near 1, where 16 bits cannot hold a step of this size.
W = (1 + RNG.uniform(0, 0.5, size=(32, 40))).astype(np.float32)
X = RNG.normal(size=(8, N, 32, 40)).astype(np.float32) / 20


def loss_fn(w: Any, x: Any) -> jax.Array:
    return (w.astype(jnp.float32) * x).sum() / len(x)


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_what_the_user_sets_is_not_undone(weight_update: str):
    dtype = "bfloat16"
    step = sgd_step(loss_fn, RATE, N, weight_update=weight_update, master_dtype="float32")
    state = train(step, step.init(jnp.asarray(W, dtype)), X[:2])
    before = np.asarray(optax.tree.get(state.opt_state, "masters"))
    # Pruned, loaded from elsewhere, and left alone.
    edited = state.params.at[:8].set(0).at[8:16].set(-3)
    state, _ = step(dataclasses.replace(state, params=edited), X[2])
    gradient = np.mean([round_to(each, dtype) for each in X[2]], 0)
    start = np.concatenate([np.zeros((8, 40)), np.full((8, 40), -3), before[16:]])
    masters = optax.tree.get(state.opt_state, "masters")
    np.testing.assert_allclose(masters, start - RATE * gradient, rtol=0, atol=3e-7)
    # The parameters are the rounded masters, and nothing else.
    np.testing.assert_array_equal(state.params, np.asarray(masters).astype(dtype))
    if weight_update == "sharded":
        assert masters.sharding.spec == P(("shards",))


def test_parameters_that_are_nan_are_not_brought_back_by_their_masters():
    step = sgd_step(loss_fn, RATE, N, master_dtype="float32")
    state = step.init(jnp.ones(40, jnp.bfloat16))
    state = dataclasses.replace(state, params=state.params.at[0].set(jnp.nan))
    state, _ = step(state, X[0, :, 0])
    assert np.isnan(np.float32(state.params)).sum() == 1


def test_the_models_average_has_the_dtype_of_the_model_and_is_its_groups():
    opt = CrossShardOptimizer(optax.sgd(RATE), group_assignment=[[0, 1], [2, 3]], ema=DECAY)
    step = make_train_step(loss_fn, opt, num_shards=N, master_dtype="float32")
    state = train(step, step.init(jnp.asarray(W, jnp.bfloat16)), X[:1])
    ema = np.asarray(optax.tree.get(step.unshard(state).opt_state, "ema"))
    assert ema.dtype == np.float32
    for shard in range(N):
        model = step.model(state, shard, ema=True)
        assert model.dtype == jnp.bfloat16
        np.testing.assert_array_equal(model, ema[shard].astype(jnp.bfloat16))
    assert (ema[0] != ema[2]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_and_the_model_may_keep_arrays_of_its_name(dtype: str):
    masters = {"master_dtype": "float32"} if dtype == "bfloat16" else {}
    step = make_train_step(
        lambda params, x: loss_fn(params["ema"], x),
        optax.chain(optax.ema(0.5, debias=False), optax.sgd(0.5)),
        num_shards=N,
        ema=0.5,
        **masters,
    )
    start = jnp.asarray(W, dtype)
    state = train(step, step.init({"ema": start}), X[:1])
    # Half of the gradient's mean moves half of the average of the parameters.
    wide = np.float64(start) - 0.5**3 * X[0].astype(dtype).mean(0, np.float64)
    average = np.float64(step.model(state, ema=True)["ema"])
    np.testing.assert_allclose(average, wide, atol=1e-6 if dtype == "float32" else 5e-3)


@pytest.mark.parametrize(
    ("dtype", "weight_update"), [("float32", "replicated"), ("bfloat16", "sharded")]
)
def test_a_schedule_warms_the_average_up(weight_update: str, dtype: str):
    warm_up = lambda count: jnp.minimum(0.8, (1 + count) / (10 + count))
    masters = {"master_dtype": "float32"} if dtype == "bfloat16" else {}
    step = make_train_step(
        loss_fn, optax.adam(RATE), num_shards=N, weight_update=weight_update, ema=warm_up, **masters
    )
    state, wide = step.init(jnp.asarray(W, dtype)), round_to(W, dtype)
    for t, x in enumerate(X):
        state, _ = step(state, x)
        now = optax.tree.get(step.unshard(state).opt_state, "masters", state.params)
        decay = min(0.8, (1 + t) / (10 + t))
        wide = decay * wide + (1 - decay) * np.asarray(now, np.float64)
    ema = optax.tree.get(step.unshard(state).opt_state, "ema")
    np.testing.assert_allclose(ema, wide, rtol=0, atol=2e-6)
    assert optax.tree.get(state.opt_state, "ema_count") == len(X)
    assert "moving average by " in step.describe()
    assert " at 0x" not in step.describe()


def sam() -> Any:
    """An optimizer whose type says that it takes more than its update does."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    return optax.contrib.sam(optax.sgd(0.2), adversary, sync_period=2)


@pytest.mark.parametrize("options", [{"ema": 0.9}, {"master_dtype": "float32"}])
def test_an_optimizer_that_takes_no_loss_gets_none(options: Any):
    loss = lambda w, x: ((x @ w - 1) ** 2).mean()
    x, w = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), jnp.zeros(4)
    step = make_train_step(loss, sam(), num_shards=2, **options)
    state, own = step.init(w), sam().init(w)
    for _ in range(4):
        state, _ = step(state, x)
        updates, own = sam().update(jax.grad(loss)(w, x), own, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(state.params, w, rtol=1e-5)


def test_a_wrapper_that_hands_it_the_loss_is_told_from_other_faults():
    step = make_train_step(lambda w, x: (x @ w).mean(), optax.chain(sam()), num_shards=2)
    with pytest.raises(ArgumentError, match=r"takes none.*optax\.GradientTransformation\(part\."):
        step.init(jnp.zeros(4))
    part = sam()
    plain = optax.chain(optax.GradientTransformation(part.init, part.update))
    make_train_step(lambda w, x: (x @ w).mean(), plain, num_shards=2).init(jnp.zeros(4))


def reads_the_loss(u: Any, s: Any, params: Any = None, value: Any = None) -> Any:
    if value is not None:
        raise TypeError("a number as argument 'value'")
    return u, s


@pytest.mark.parametrize(
    "update",
    [
        lambda u, s, p=None: (jnp.full(4, value=u), s),
        lambda u, s, value, params=None: (u, s),
        reads_the_loss,
    ],
)
def test_another_fault_of_an_update_is_said_as_it_is(update: Any):
    optimizer = optax.GradientTransformationExtraArgs(lambda p: (), update)
    step = make_train_step(lambda w, x: (x @ w).mean(), optimizer, num_shards=2)
    with pytest.raises(ArgumentError, match=r"cannot update these parameters.*argument 'value'"):
        step.init(jnp.zeros(4))
