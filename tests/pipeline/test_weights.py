"""weight: a shard's weight in the mean, in all three ways in, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.pipeline.ways import WAYS, trained
from tests.quick import deep, deep_but
from tests.step.common import sgd_step

N, STEPS, RATE, DECAY = 4, 3, 0.1, 0.3
GROUPS = [[0, 2], [1, 3]]
RNG = np.random.default_rng(0)
W = RNG.normal(size=3).astype(np.float32)
X = RNG.normal(size=(STEPS, N, 2, 3)).astype(np.float32)
WEIGHTS = np.float32([[1, 2, 3, 0.5], [0, 1, 0, 4], [2, 0, 1, 0]])
# What weighs nothing has NaN for data.
X[WEIGHTS == 0] = np.nan
# Weight decay would show in a step that should not be one, and momentum too.
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(RATE),
    "decay and momentum": lambda: optax.chain(
        optax.add_decayed_weights(DECAY), optax.sgd(RATE, momentum=0.9)
    ),
}


def loss_fn(w: Any, x: Any) -> jax.Array:
    return ((x @ w - 1) ** 2).mean()


def expected(name: str, groups: list[list[int]]) -> np.ndarray:
    """``[steps, shards, …]``: the parameters after each step, in float64."""
    w, found = np.stack([np.float64(W)] * N), []
    trace = np.zeros_like(w)
    for x, weights in zip(X, np.float64(WEIGHTS), strict=True):
        for group in groups:
            members = [s for s in group if weights[s]]
            if not members:
                continue
            own = w[group[0]]
            each = [weights[s] * x[s].T @ (x[s] @ own - 1) for s in members]
            mean = np.sum(each, 0) / weights[members].sum()
            if name != "sgd":
                mean = trace[group[0]] = 0.9 * trace[group[0]] + mean + DECAY * own
            w[group] = own - RATE * mean
        found.append(w.copy())
    return np.stack(found)


def train(way: str, opt: CrossShardOptimizer) -> Any:
    of_rows = np.repeat(WEIGHTS / 2, 2).reshape(STEPS, N, 2)
    batches = ({"x": x, "n": n} for x, n in zip(X, of_rows, strict=True))
    loss = lambda params, batch: loss_fn(params["w"], batch["x"])
    return trained(way, opt, loss, {"w": W}, batches, weigh=lambda batch: batch["n"].sum())


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"vmap"}))
@pytest.mark.parametrize(
    ("name", "grouped"),
    deep_but(
        [("sgd", False), ("decay and momentum", True)],
        [(name, grouped) for name in OPTIMIZERS for grouped in (False, True)],
    ),
)
def test_the_mean_is_weighed(way: str, name: str, grouped: bool):
    opt = CrossShardOptimizer(OPTIMIZERS[name](), group_assignment=GROUPS if grouped else None)
    groups = GROUPS if grouped else [list(range(N))]
    found = train(way, opt)
    for (got, metrics), want, weight in zip(found, expected(name, groups), WEIGHTS, strict=True):
        np.testing.assert_allclose(got["w"], want, rtol=0, atol=2e-6)
        if metrics:
            totals = [weight[group].sum() for s in range(N) for group in groups if s in group]
            np.testing.assert_allclose(np.broadcast_to(metrics["weight"], N), totals, rtol=1e-6)
            assert np.broadcast_to(metrics["skipped"], N).tolist() == [t == 0 for t in totals]


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
@pytest.mark.parametrize("inner", [deep("sgd"), "adamw", deep("lamb")])
def test_a_step_in_which_nothing_weighs_changes_no_bit(inner: str, weight_update: str):
    w = RNG.normal(size=(32, 40)).astype(np.float32)
    step = make_train_step(
        lambda w, batch: ((batch["x"] @ w) ** 2).mean(),
        CrossShardOptimizer(getattr(optax, inner)(0.1), preprocess=optax.trace(0.5)),
        num_shards=N,
        weight_update=weight_update,
        weight=lambda batch: batch["n"].sum(),
        loss_over="shard",
        ema=0.9,
    )
    x = RNG.normal(size=(2 * N, 32)).astype(np.float32)
    state, _ = step(step.init(w), {"x": x, "n": np.ones(2 * N, np.float32)})
    before = jax.tree.map(np.array, state)
    nothing = {"x": np.full_like(x, np.nan), "n": np.zeros(2 * N, np.float32)}
    state, metrics = step(state, nothing)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state))
    assert metrics["skipped"]
    assert float(metrics["weight"]) == 0
    state, metrics = step(state, {"x": x, "n": np.ones(2 * N, np.float32)})
    assert not metrics["skipped"]
    assert int(state.step) == 2


def test_a_weight_in_a_sum_is_refused_in_every_way():
    opt = CrossShardOptimizer(optax.sgd(RATE), "sum")
    with pytest.raises(crossshard.errors.ArgumentError, match="reduction is SUM"):
        make_train_step(loss_fn, opt, num_shards=N, weight="n")
    for way in ("update, types", "variables, minimize", "variables, pairs"):
        with pytest.raises(crossshard.errors.ArgumentError, match="reduction is SUM"):
            next(train(way, CrossShardOptimizer(optax.sgd(RATE), "sum")))


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (np.ones(2, np.float32), crossshard.errors.ArgumentError),
        ("n", crossshard.errors.ArgumentTypeError),
        (object(), crossshard.errors.ArgumentTypeError),
    ],
)
def test_what_is_not_one_number_is_refused(bad: Any, kind: Any):
    opt = CrossShardOptimizer(optax.sgd(RATE))
    run = jax.vmap(lambda g: opt.update(g, opt.init(g), weight=bad)[0], axis_name="shards")
    with pytest.raises(kind, match="weight is one number"):
        run(jnp.ones((N, 3)))


def test_equal_weights_are_none():
    plain = sgd_step(lambda w, b: loss_fn(w, b["x"]), RATE, N)
    weighed = sgd_step(lambda w, b: loss_fn(w, b["x"]), RATE, N, weight=lambda b: 7.0)
    batch = {"x": RNG.normal(size=(2 * N, 3)).astype(np.float32)}
    a, _ = plain(plain.init(W), batch)
    b, _ = weighed(weighed.init(W), batch)
    np.testing.assert_allclose(a.params, b.params, rtol=0, atol=1e-6)
