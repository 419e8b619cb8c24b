"""preprocess: applied to each shard's own gradient before it is reduced, in all three ways in."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.pipeline.ways import WAYS, trained
from tests.quick import deep, deep_but
from tests.step.common import assert_close

N, STEPS, CLIP = 8, 5, 0.5
GROUPS = [[0, 2, 4, 6], [1, 3, 5, 7]]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, N, 4, 40)).astype(np.float32) * RNG.uniform(0.1, 3, size=(1, N, 1, 1))
X = X.astype(np.float32)
Y = RNG.normal(size=(STEPS, N, 4, 32)).astype(np.float32)
INIT = {
    "kernel": RNG.normal(size=(40, 32)).astype(np.float32) * 0.1,
    "bias": np.zeros(32, np.float32),
}
LEARNING_RATE = 0.1


def loss_of(params, batch):
    x, y = batch
    return ((x @ params["kernel"] + params["bias"] - y) ** 2).mean()


def gradient(params, x, y):
    """The gradient of ``loss_of``, in numpy."""
    error = 2 * (x @ params["kernel"] + params["bias"] - y) / y.size
    return {"kernel": x.T @ error, "bias": error.sum(0)}


def clipped(gradients):
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    return {name: g * min(1.0, CLIP / norm) for name, g in gradients.items()}


class Clip:
    """optax.clip_by_global_norm, in numpy."""

    transformation = staticmethod(lambda: optax.clip_by_global_norm(CLIP))

    def __call__(self, shard, gradients):
        return clipped(gradients)


class Momentum:
    """optax.trace, in numpy; each shard has its own."""

    transformation = staticmethod(lambda: optax.trace(0.9))

    def __init__(self):
        self.trace = {}

    def __call__(self, shard, gradients):
        before = self.trace.get(shard, dict.fromkeys(gradients, 0.0))
        self.trace[shard] = {name: g + 0.9 * before[name] for name, g in gradients.items()}
        return self.trace[shard]


class ClippedMomentum:
    """A chain with a state of its own: neither is linear, so that the order shows."""

    transformation = staticmethod(
        lambda: optax.chain(optax.trace(0.9), optax.clip_by_global_norm(CLIP))
    )

    def __init__(self):
        self.momentum = Momentum()

    def __call__(self, shard, gradients):
        return clipped(self.momentum(shard, gradients))


class Sgd:
    make = staticmethod(lambda: optax.sgd(LEARNING_RATE))

    def __call__(self, params, gradients):
        return {name: params[name] - LEARNING_RATE * g for name, g in gradients.items()}


class Adam:
    # An eps that does not magnify rounding where a gradient is nearly zero.
    make = staticmethod(lambda: optax.adam(0.01, eps=1e-3))

    def __init__(self):
        self.count, self.mu, self.nu = 0, None, None

    def __call__(self, params, gradients):
        self.count += 1
        zero = dict.fromkeys(gradients, 0.0)
        self.mu = {k: 0.9 * (self.mu or zero)[k] + 0.1 * g for k, g in gradients.items()}
        self.nu = {k: 0.999 * (self.nu or zero)[k] + 0.001 * g**2 for k, g in gradients.items()}
        return {
            k: params[k]
            - 0.01
            * (self.mu[k] / (1 - 0.9**self.count))
            / (np.sqrt(self.nu[k] / (1 - 0.999**self.count)) + 1e-3)
            for k in gradients
        }


@functools.cache
def expected(preprocess, optimizer, reduction, grouped):
    """Per shard the parameters after the last step, in numpy float64."""
    groups = GROUPS if grouped else [list(range(N))]
    own = preprocess()
    after = [None] * N
    for members in groups:
        params = {name: value.astype(np.float64) for name, value in INIT.items()}
        step = optimizer()
        for t in range(STEPS):
            each = [own(s, gradient(params, *map(np.float64, (X[t, s], Y[t, s])))) for s in members]
            divisor = len(members) if reduction == "mean" else 1
            total = {name: sum(g[name] for g in each) / divisor for name in INIT}
            params = step(params, total)
        for shard in members:
            after[shard] = params
    return {name: np.stack([each[name] for each in after]) for name in INIT}


def optimizer_for(preprocess, optimizer, reduction, grouped, **how):
    return CrossShardOptimizer(
        optimizer.make(),
        reduction,
        group_assignment=GROUPS if grouped else None,
        preprocess=preprocess.transformation(),
        **how,
    )


def train(way, opt):
    batches = zip(X, Y, strict=True)
    *_, (last, _) = trained(way, opt, loss_of, INIT, batches, number=N)
    return last


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"variables, minimize"}))
@pytest.mark.parametrize(
    ("preprocess", "optimizer", "reduction", "grouped"),
    [
        *deep_but(
            [(Clip, Sgd, "mean", False), (ClippedMomentum, Adam, "mean", False)],
            itertools.product([Clip, Momentum, ClippedMomentum], [Sgd, Adam], ["mean"], [False]),
        ),
        (ClippedMomentum, Sgd, "sum", False),
        (ClippedMomentum, Sgd, "mean", True),
        deep((ClippedMomentum, Sgd, "sum", True)),
    ],
)
def test_it_follows_numpy(way, preprocess, optimizer, reduction, grouped):
    got = train(way, optimizer_for(preprocess, optimizer, reduction, grouped))
    assert_close(got, expected(preprocess, optimizer, reduction, grouped), atol=5e-6)


def test_a_sharded_weight_update_in_ones_own_shard_map():
    opt = optimizer_for(ClippedMomentum, Adam, "mean", False, weight_update="sharded")
    assert opt.state_specs(INIT, N).inner_state[0].mu["kernel"] == P("shards")
    got = train("update, no types", opt)
    assert_close(got, expected(ClippedMomentum, Adam, "mean", False), atol=5e-6)


def test_on_global_arrays():
    inner = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(LEARNING_RATE))
    one, other = (
        train(way, CrossShardOptimizer(inner, preprocess=optax.trace(0.9)))
        for way in ("step, replicated", "step, sharded")
    )
    assert_close(one, other, atol=1e-6)


def test_clipping_before_the_mean_is_not_clipping_after_it():
    after = optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(LEARNING_RATE))
    one = train("step, replicated", CrossShardOptimizer(after))
    other = expected(Clip, Sgd, "mean", False)
    assert np.abs(np.asarray(one["kernel"]) - other["kernel"]).max() > 1e-3


def test_its_state_is_one_per_shard():
    step = make_train_step(loss_of, optimizer_for(Momentum, Sgd, "mean", False), num_shards=N)
    state = step.init(INIT)
    state, _ = step(state, (X[0].reshape(-1, 40), Y[0].reshape(-1, 32)))
    trace = state.opt_state.preprocess.trace["bias"]
    assert trace.shape == (N, 32)
    assert trace.sharding.spec == P(("shards",))
    want = [gradient(INIT, X[0, s], Y[0, s])["bias"] for s in range(N)]
    np.testing.assert_allclose(trace, want, atol=1e-6)


def test_its_state_goes_to_another_number_of_shards():
    batch = X[0].reshape(-1, 40), Y[0].reshape(-1, 32)
    opt = optimizer_for(Momentum, Sgd, "mean", False)
    eight = make_train_step(loss_of, opt, num_shards=8)
    state, _ = eight(eight.init(INIT), batch)
    saved = eight.unshard(state)
    two = make_train_step(loss_of, opt, num_shards=2)
    there = two.reshard(saved)
    assert there.opt_state.preprocess.trace["bias"].shape == (2, 32)
    # A mean of momenta of equal parts is the momentum of the whole, so that the mean goes on.
    np.testing.assert_allclose(
        np.asarray(there.opt_state.preprocess.trace["bias"]).mean(0),
        np.asarray(saved.opt_state.preprocess.trace["bias"]).mean(0),
        atol=1e-6,
    )
    one, other = eight.reshard(saved), there
    one, _ = eight(one, batch)
    other, _ = two(other, batch)
    np.testing.assert_allclose(one.params["kernel"], other.params["kernel"], atol=1e-6)


def test_a_preprocessor_that_draws_draws_its_own_on_every_shard():
    noise = optax.add_noise(1.0, 0.0, jax.random.key(0))
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=noise)
    constant = {"w": np.zeros(2000, np.float32)}
    spread = {}
    for n in (1, 8):
        step = make_train_step(lambda p, x: 0.0 * (p["w"].sum() + x.mean()), opt, num_shards=n)
        state, _ = step(step.init(constant), np.zeros(8, np.float32))
        spread[n] = float(np.std(state.params["w"]))
    # A mean of eight draws has an eighth of the variance of one.
    assert spread[1] == pytest.approx(1.0, rel=0.1)
    assert spread[8] == pytest.approx(8**-0.5, rel=0.1)


def test_an_unknown_number_of_shards_is_refused_where_the_state_needs_it():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.trace(0.9))
    with pytest.raises(crossshard.errors.ShardContextError, match="shard_context"):
        opt.init(jnp.ones(3))
    with crossshard.shard_context(4):
        assert opt.init(jnp.ones(3)).preprocess.trace.shape == (4, 3)


def test_a_state_of_all_shards_is_refused_where_one_is_wanted():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.trace(0.9))
    with crossshard.shard_context(4):
        state = opt.init(jnp.ones(3))
    with pytest.raises(crossshard.errors.ArgumentError, match="state_specs"):
        jax.vmap(lambda g: opt.update(g, state)[0], axis_name="shards")(jnp.ones((4, 3)))


def test_a_preprocessor_that_reduces_is_refused():
    with pytest.raises(crossshard.errors.NestedReductionError):
        CrossShardOptimizer(optax.sgd(1.0), preprocess=CrossShardOptimizer(optax.identity()))
    hidden = optax.chain(CrossShardOptimizer(optax.identity()))
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=hidden)
    with pytest.raises(crossshard.errors.NestedReductionError):
        jax.vmap(lambda g: opt.update(g, opt.init(g))[0], axis_name="shards")(jnp.ones(4))


def test_describe_names_it():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.clip_by_global_norm(1.0))
    assert opt.describe() == (
        "local gradient → preprocess (clip_by_global_norm) → mean over all shards → update"
    )


def test_a_shard_without_weight_leaves_no_trace_in_its_state():
    opt = CrossShardOptimizer(optax.sgd(0.1), preprocess=optax.trace(0.9))
    loss = lambda w, batch: (w * batch["x"]).mean()
    weight = lambda b: b["mask"].sum()
    step = make_train_step(loss, opt, num_shards=2, weight=weight, loss_over="shard")
    state = step.init(np.float32(1.0))
    padded = {"x": np.float32([1, 3, np.nan, np.nan]), "mask": np.float32([1, 1, 0, 0])}
    state, _ = step(state, padded)
    np.testing.assert_allclose(state.opt_state.preprocess.trace, [2.0, 0.0])
    whole = {"x": np.float32([1, 3, 5, 7]), "mask": np.ones(4, np.float32)}
    state, _ = step(state, whole)
    # Momenta 0.9 · 2 + 2 and 6; their mean by weight is 4.9, after a step of 2 by the first alone.
    np.testing.assert_allclose(state.params, 1 - 0.1 * 2 - 0.1 * 4.9, rtol=1e-6)
