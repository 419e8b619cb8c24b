"""weight: a shard's weight in the mean, in all three ways in, against numpy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.quick import deep, deep_but

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


def by_update(opt: CrossShardOptimizer, check_vma: bool) -> list[Any]:
    grouped = opt.group_assignment is not None
    one = lambda tree: jax.tree.map(lambda x: x[0], tree) if grouped else tree
    each = lambda tree: jax.tree.map(lambda x: x[None], tree) if grouped else tree
    mesh = jax.make_mesh((N,), ("shards",), axis_types=(AxisType.Auto,), devices=jax.devices()[:N])
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    carried = P("shards") if grouped else P()

    def step(w: Any, state: Any, x: Any, weight: Any) -> Any:
        w, state = one((w, state))
        gradient = crossshard.grad(loss_fn)(w, x[0])
        updates, state = opt.update(gradient, state, w, weight=weight[0])
        return each((optax.apply_updates(w, updates), state))

    run = jax.jit(
        over(step, in_specs=(carried, carried, P("shards"), P("shards")), out_specs=carried)
    )
    spread = lambda x: np.broadcast_to(x, (N, *np.shape(x)))
    w, state = (jax.tree.map(spread, t) if grouped else t for t in (W, opt.init(W)))
    found = []
    for x, weight in zip(X, WEIGHTS, strict=True):
        w, state = run(w, state, x, weight)
        found.append(w if grouped else spread(w))
    return found


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.asarray(W))


def by_variables(opt: CrossShardOptimizer, minimize: bool) -> list[Any]:
    model = Model()

    @crossshard.shard(num_shards=N)
    def step(model: Any, opt: Any, x: Any, weight: Any) -> None:
        loss = lambda: loss_fn(model.w[...], x[0])
        if minimize:
            opt.minimize(loss, var_list=model, weight=weight[0])
        else:
            pairs = opt.compute_gradients(loss, var_list=model)
            opt.apply_gradients(pairs, weight=weight[0])

    found = []
    for x, weight in zip(X, WEIGHTS, strict=True):
        step(model, opt, x, weight)
        is_one = not crossshard.nnx.is_per_shard(model.w)
        found.append(np.stack([model.w[...]] * N) if is_one else model.w[...].array)
    return found


def by_train_step(opt: CrossShardOptimizer) -> list[Any]:
    step = make_train_step(
        lambda w, batch: loss_fn(w, batch["x"]),
        opt,
        num_shards=N,
        weight=lambda batch: batch["n"].sum(),
    )
    state, found = step.init(W), []
    for x, weight in zip(X, WEIGHTS, strict=True):
        batch = {"x": x.reshape(-1, 3), "n": np.repeat(weight / 2, 2)}
        state, metrics = step(state, batch)
        members = [range(N)] * N if opt.group_assignment is None else [[0, 2], [1, 3]] * 2
        totals = [weight[list(each)].sum() for each in members]
        np.testing.assert_allclose(np.broadcast_to(metrics["weight"], N), totals, rtol=1e-6)
        assert np.broadcast_to(metrics["skipped"], N).tolist() == [t == 0 for t in totals]
        of_one = np.ndim(state.params) == 1
        found.append(np.stack([state.params] * N) if of_one else np.array(state.params))
    return found


WAYS = {
    "update, types": lambda opt: by_update(opt, True),
    "update, no types": lambda opt: by_update(opt, False),
    "minimize": lambda opt: by_variables(opt, True),
    "pairs": lambda opt: by_variables(opt, False),
    "step": by_train_step,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "grouped"),
    deep_but(
        [("sgd", False), ("decay and momentum", True)],
        [(name, grouped) for name in OPTIMIZERS for grouped in (False, True)],
    ),
)
def test_the_mean_is_weighed(way: str, name: str, grouped: bool):
    opt = CrossShardOptimizer(OPTIMIZERS[name](), group_assignment=GROUPS if grouped else None)
    want = expected(name, GROUPS if grouped else [list(range(N))])
    for got, each in zip(WAYS[way](opt), want, strict=True):
        np.testing.assert_allclose(got, each, rtol=0, atol=2e-6)


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
    for way in ("update, types", "minimize", "pairs"):
        with pytest.raises(crossshard.errors.ArgumentError, match="reduction is SUM"):
            WAYS[way](CrossShardOptimizer(optax.sgd(RATE), "sum"))


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
    plain = make_train_step(lambda w, b: loss_fn(w, b["x"]), optax.sgd(RATE), num_shards=N)
    weighed = make_train_step(
        lambda w, b: loss_fn(w, b["x"]), optax.sgd(RATE), num_shards=N, weight=lambda b: 7.0
    )
    batch = {"x": RNG.normal(size=(2 * N, 3)).astype(np.float32)}
    a, _ = plain(plain.init(W), batch)
    b, _ = weighed(weighed.init(W), batch)
    np.testing.assert_allclose(a.params, b.params, rtol=0, atol=1e-6)
