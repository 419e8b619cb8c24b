"""preprocess: its state, its noise, and where it cannot run.

That it is applied to each shard's own gradient before the sum, in each way in, with groups, weights
and all else, hold the combinations, by their factor of this name.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, NestedReductionError, ShardContextError
from tests.quick import deep

RNG = np.random.default_rng(0)
W = RNG.normal(size=(40, 32)).astype(np.float32)
X = RNG.normal(size=(32, 40)).astype(np.float32)


def loss_fn(w, x):
    return ((x @ w) ** 2).mean()


def tracing(**options):
    return CrossShardOptimizer(optax.sgd(0.1), preprocess=optax.trace(0.9), **options)


@pytest.mark.parametrize("weight_update", [deep("replicated"), "sharded"])
def test_its_state_is_one_per_shard_and_goes_to_another_number_of_shards(weight_update):
    inner = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1))
    opt = CrossShardOptimizer(inner, preprocess=optax.trace(0.9))
    eight, two = (
        make_train_step(loss_fn, opt, num_shards=number, weight_update=weight_update)
        for number in (8, 2)
    )
    state, _ = eight(eight.init(W), X)
    trace = state.opt_state.preprocess.trace
    assert trace.sharding.spec == P(("shards",))
    want = [jax.jit(jax.grad(loss_fn))(W, each) for each in np.split(X, 8)]
    np.testing.assert_allclose(trace, want, atol=1e-6)
    saved = eight.unshard(state)
    one, other = eight.reshard(saved), two.reshard(saved)
    moved = other.opt_state.preprocess.trace
    assert moved.shape == (2, *W.shape)
    # A mean of momenta of equal parts is the momentum of the whole, so that the mean goes on.
    np.testing.assert_allclose(np.mean(moved, 0), np.mean(trace, 0), atol=1e-6)
    params = [step(state, X)[0].params for step, state in ((eight, one), (two, other))]
    np.testing.assert_allclose(*params, atol=1e-6)


def test_a_preprocessor_that_draws_draws_its_own_on_every_shard():
    noise = optax.add_noise(1.0, 0.0, jax.random.key(0))
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=noise)
    spread = {}
    for n in (1, 8):
        step = make_train_step(lambda w, x: 0.0 * (w.sum() + x.mean()), opt, num_shards=n)
        state, _ = step(step.init(np.zeros(2000, np.float32)), np.zeros(8, np.float32))
        spread[n] = float(np.std(state.params))
    # A mean of eight draws has an eighth of the variance of one.
    assert spread[1] == pytest.approx(1.0, rel=0.1)
    assert spread[8] == pytest.approx(8**-0.5, rel=0.1)


def test_the_number_of_shards_of_its_state():
    with pytest.raises(ShardContextError, match="shard_context"):
        tracing().init(jnp.ones(3))
    with crossshard.shard_context(4):
        state = tracing().init(jnp.ones(3))
    assert state.preprocess.trace.shape == (4, 3)
    with pytest.raises(ArgumentError, match="state_specs"):
        jax.vmap(lambda g: tracing().update(g, state)[0], axis_name="shards")(jnp.ones((4, 3)))


def test_a_preprocessor_that_reduces_is_refused():
    reducing = CrossShardOptimizer(optax.identity())
    with pytest.raises(NestedReductionError):
        CrossShardOptimizer(optax.sgd(1.0), preprocess=reducing)
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.chain(reducing))
    with pytest.raises(NestedReductionError):
        jax.vmap(lambda g: opt.update(g, opt.init(g))[0], axis_name="shards")(jnp.ones(4))
