"""nonfinite: a shard, or a step, that is not finite does not count and is named; against numpy."""

import dataclasses
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, Nonfinite, make_train_step
from crossshard.errors import NonfiniteError
from tests.pipeline.ways import IN_ONES_OWN
from tests.quick import deep
from tests.step.common import sgd_step

N, STEPS, RATE = 4, 7, 0.1
GROUPS = [[0, 2], [1, 3]]
RNG = np.random.default_rng(0)
PARAMS = {
    "bias": RNG.normal(size=(40,)).astype(np.float32),
    "kernel": RNG.normal(size=(32, 40)).astype(np.float32),
}
X = RNG.normal(size=(STEPS, N, 4, 40)).astype(np.float32) / 6
SCALE = np.ones((STEPS, N, 2), np.float32)
# The shards that are bad in a step, with the first bad leaf of each: all of them in step 4.
BAD = {1: {2: 1}, 2: {0: 0, 3: 1}, 4: {0: 0, 1: 1, 2: 0, 3: 0}, 5: {1: 0}}
for _step, _shards in BAD.items():
    for _shard, _leaf in _shards.items():
        SCALE[_step, _shard, _leaf] = [np.nan, np.inf][_shard % 2]
IN_A_ROW = [0, 1, 2, 0, 1, 2, 0]
WEIGHTS = RNG.uniform(0.5, 2, size=(STEPS, N, 4)).astype(np.float32)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """A shard's loss, whose gradient is multiplied by its scales, one for each leaf."""
    bias, kernel = (params[k] * batch["scale"][0, i] for i, k in enumerate(("bias", "kernel")))
    weight = batch["weight"]
    each = ((batch["x"] @ kernel.T - 1) ** 2).sum(-1) + (batch["x"] * bias).sum(-1)
    return (weight * each).sum() / weight.sum()


def batch_of(t: int, *, weighted: bool = False) -> dict[str, np.ndarray]:
    weight = WEIGHTS[t] if weighted else np.ones_like(WEIGHTS[t])
    scale = np.broadcast_to(SCALE[t, :, None], (N, 4, 2))
    return {"x": X[t], "weight": weight, "scale": scale}


def rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def gradient_of(params: Any, x: np.ndarray, weight: np.ndarray) -> Any:
    x, weight = np.float64(x), np.float64(weight)
    of_kernel = 2 * ((x @ params["kernel"].T - 1) * weight[:, None]).T @ x
    return {"bias": weight @ x / weight.sum(), "kernel": of_kernel / weight.sum()}


@functools.cache
def expected(action: str, momentum: float, weighted: bool, grouped: bool) -> list[list[Any]]:
    """The parameters of every shard after each step, in float64."""
    members = {s: g for g in (GROUPS if grouped else [range(N)]) for s in g}
    params = [jax.tree.map(np.float64, PARAMS)] * N
    trace = [jax.tree.map(np.zeros_like, params[0])] * N
    found = []
    for t in range(STEPS):
        bad, weight = BAD.get(t, {}), batch_of(t, weighted=weighted)["weight"]
        given = [gradient_of(params[s], X[t, s], weight[s]) for s in range(N)]
        new, traces = list(params), list(trace)
        for s in range(N):
            good = [k for k in members[s] if k not in bad]
            if not good or (bad and action != "quarantine"):
                continue
            share = [weight[k].sum() / sum(weight[g].sum() for g in good) for k in good]
            mean = jax.tree.map(
                lambda *g, share=share: sum(a * b for a, b in zip(share, g, strict=True)),
                *[given[k] for k in good],
            )
            traces[s] = jax.tree.map(lambda m, g: momentum * m + g, trace[s], mean)
            new[s] = jax.tree.map(lambda p, m: p - RATE * m, params[s], traces[s])
        params, trace = new, traces
        found.append(params)
    return found


def check(t: int, action: str, params: Any, found: Any, **kind: Any) -> None:
    """The parameters of shard 0, or of all, and what was found."""
    want = expected(action, **kind)[t]
    stacked = jax.tree.map(lambda *each: np.stack(each), *want)
    want = stacked if kind["grouped"] else want[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), params, want)
    bad = BAD.get(t, {})
    first = min(bad, default=-1)
    of_one = [int(np.ravel(x)[0]) for x in found]
    assert of_one == [first, bad.get(first, -1), len(bad), 0, IN_A_ROW[t]]


def optimizer(momentum: float, **options: Any) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.sgd(RATE, momentum=momentum or None), **options)


@pytest.mark.parametrize(
    ("weight_update", "action"),
    [
        *(("replicated", "quarantine"), ("sharded", "skip")),
        *(deep(("sharded", "quarantine")), deep(("replicated", "skip"))),
    ],
)
@pytest.mark.parametrize(
    ("momentum", "weighted", "grouped"),
    [(0.0, False, False), (0.9, True, False), (0.9, True, True)],
)
def test_a_whole_step(
    weight_update: str, action: str, momentum: float, weighted: bool, grouped: bool
):
    groups = GROUPS if grouped else None
    step = make_train_step(
        loss_fn,
        optimizer(momentum, group_assignment=groups, nonfinite=action),
        num_shards=N,
        weight_update=weight_update,
        weight="weight" if weighted else None,
        loss_over="shard",
    )
    state = step.init(PARAMS)
    for t in range(STEPS):
        before = int(state.step)
        state, metrics = step(state, rows(batch_of(t, weighted=weighted)))
        kind = {"momentum": momentum, "weighted": weighted, "grouped": grouped}
        check(t, action, state.params, metrics["nonfinite"], **kind)
        skipped = len(BAD.get(t, {})) == N or (t in BAD and action == "skip")
        assert np.all(np.asarray(metrics["skipped"]) == skipped)
        assert int(state.step) == before + (not skipped)
        assert np.all(np.isfinite(metrics["loss"])) or skipped


@pytest.mark.parametrize("way", IN_ONES_OWN)
@pytest.mark.parametrize("action", ["quarantine", "skip"])
def test_in_code_of_ones_own(action: str, way: str):
    opt = optimizer(0.9, nonfinite=Nonfinite(action) if way == "types" else action)
    calls = IN_ONES_OWN[way](opt, loss_fn, PARAMS, map(batch_of, range(STEPS)))
    for t, (params, state, *_) in enumerate(calls):
        kind = {"momentum": 0.9, "weighted": False, "grouped": False}
        check(t, action, params, state.nonfinite, **kind)
    assert t == STEPS - 1


# What a reduction makes of finite gradients.


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
@pytest.mark.parametrize("action", ["quarantine", "skip"])
def test_a_reduction_that_overflows_is_told_from_a_bad_shard(action: str, weight_update: str):
    step = sgd_step(
        lambda w, x: (w * x).sum() / len(x), 1.0, N, nonfinite=action, weight_update=weight_update
    )
    w = np.zeros((64, 64), np.float32)
    x = np.ones((N, 64, 64), np.float32)
    # Each is finite, and their sum is not, in the slice that the last shard updates.
    x[:, 60, 5] = 2e38
    state, metrics = step(step.init(w), x)
    assert [int(v) for v in metrics["nonfinite"]] == [-1, -1, 0, 1, 1]
    assert "overflows" in metrics["nonfinite"].describe(w)
    assert metrics["skipped"]
    np.testing.assert_array_equal(state.params, w)


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_infinities_that_cancel_are_named(weight_update: str):
    x = np.ones((N, 64, 64), np.float32)
    x[1, 3, 5], x[3, 3, 5] = np.inf, -np.inf
    step = sgd_step(
        lambda w, x: (w * x).sum() / len(x),
        1.0,
        N,
        nonfinite="quarantine",
        weight_update=weight_update,
    )
    state, metrics = step(step.init(np.zeros((64, 64), np.float32)), x)
    assert [int(v) for v in metrics["nonfinite"]] == [1, 0, 2, 0, 1]
    np.testing.assert_array_equal(state.params, -np.ones((64, 64)))


@pytest.mark.parametrize("place", range(0, 40, 13))
@pytest.mark.parametrize("shape", [(40,), (3, 40), (40, 2, 1), ()])
def test_it_is_found_wherever_it_is(shape: tuple[int, ...], place: int):
    # Each shard looks through a part of what all have: the last ones are short, or overlap.
    x = np.ones((3, *shape), np.float32)
    x[2].reshape(-1)[place % max(1, x[2].size)] = np.nan
    x[2] = np.nan if shape == () else x[2]
    step = sgd_step(lambda w, x: (w * x).sum() / len(x), 1.0, 3, nonfinite="skip")
    _, metrics = step(step.init(np.zeros(shape, np.float32)), x)
    assert metrics["skipped"]
    assert int(metrics["nonfinite"].shard) == 2


@pytest.mark.parametrize("action", ["quarantine", "skip"])
def test_a_shard_of_weight_0_may_hold_nan(action: str):
    loss = lambda w, b: (w * b["x"] * b["n"]).sum() / b["n"].sum()
    step = sgd_step(loss, 1.0, N, nonfinite=action, weight="n")
    x = np.float32([1, np.nan, 3, 5])
    state, metrics = step(step.init(np.float32(0)), {"x": x, "n": np.float32([1, 0, 2, 1])})
    assert [int(v) for v in metrics["nonfinite"]] == [-1, -1, 0, 0, 0]
    assert float(state.params) == -(1 + 2 * 3 + 5) / 4


# With other stages.


@pytest.mark.parametrize("action", ["quarantine", "skip"])
def test_what_preprocess_makes_finite_is_named(action: str):
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.clip(1.0), nonfinite=action)
    step = make_train_step(lambda w, x: (w * x).sum() / len(x), opt, num_shards=2)
    state, metrics = step(step.init(np.float32(0)), np.float32([np.inf, 0.5]))
    assert int(metrics["nonfinite"].shard) == 0
    assert float(state.params) == (-0.5 if action == "quarantine" else 0)


@pytest.mark.parametrize("action", ["quarantine", "skip"])
def test_the_update_has_a_derivative(action: str):
    opt = CrossShardOptimizer(optax.sgd(1.0), nonfinite=action)

    def of_one(g: jax.Array) -> jax.Array:
        return opt.update(g, opt.init(g))[0].sum()

    x = np.ones((N, 3), np.float32)
    total = lambda x: jax.vmap(of_one, axis_name="shards")(x)[0]
    np.testing.assert_allclose(jax.grad(total)(x), np.full((N, 3), -1 / N))


def test_a_bad_microbatch_leaves_out_its_shard():
    x = RNG.normal(size=(N, 2, 3)).astype(np.float32)
    x[1, 1] = np.nan
    step = sgd_step(lambda w, x: (w * x).mean(), 1.0, N, accumulate_steps=2, nonfinite="quarantine")
    state, metrics = step(step.init(np.zeros(3, np.float32)), x.reshape(-1, 3))
    good = np.delete(x, 1, 0).reshape(-1, 3)
    np.testing.assert_allclose(state.params, -good.mean(0) / 3, rtol=1e-5)
    assert int(metrics["nonfinite"].shard) == 1


def test_calls_that_accumulate_find_it_at_the_last():
    opt = CrossShardOptimizer(optax.sgd(1.0), accumulate_steps=2, nonfinite="quarantine")
    x = np.float32([[[1], [2], [np.nan], [4]], [[1], [2], [3], [4]]])
    state = jax.vmap(lambda _: opt.init(jnp.zeros(1)), axis_name="shards")(jnp.zeros(N))
    each = jax.vmap(lambda g, s: opt.update(g, s), axis_name="shards")
    updates, state = each(x[0], state)
    np.testing.assert_array_equal(updates, 0)
    updates, state = each(x[1], state)
    np.testing.assert_allclose(updates, -np.full((N, 1), 7 / 3), rtol=1e-6)
    np.testing.assert_array_equal(state.nonfinite.shard, [2] * N)


def test_the_preprocessors_state_of_a_bad_shard_stays():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=optax.trace(0.5), nonfinite="quarantine")
    step = make_train_step(lambda w, x: (w * x).sum() / len(x), opt, num_shards=2)
    state = step.init(np.float32(0))
    state, _ = step(state, np.float32([1, 2]))
    state, _ = step(state, np.float32([np.inf, 4]))
    np.testing.assert_allclose(state.opt_state.preprocess.trace, [1, 5])
    assert float(state.params) == -1.5 - 5


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False, momentum=0.5)(x)


@pytest.mark.parametrize("kind", ["mean", "per_shard"])
def test_statistics_of_a_bad_shard_do_not_count(kind: str):
    variables = Normed().init(jax.random.key(0), np.zeros((2, 3)))

    def loss(params: Any, stats: Any, x: Any) -> Any:
        out, after = Normed().apply({"params": params, **stats}, x, mutable=["batch_stats"])
        return (out**2).sum(), (after, {"mean": x.mean()})

    step = sgd_step(
        loss,
        0.1,
        N,
        model_state=kind,
        nonfinite="quarantine",
        has_aux=True,
        aux_reduction="mean",
        loss_over="shard",
    )
    stats = {"batch_stats": variables["batch_stats"]}
    state = step.init(variables["params"], model_state=stats)
    x = RNG.normal(size=(N, 5, 3)).astype(np.float32)
    x[1, 0] = np.nan
    state, metrics = step(state, x.reshape(-1, 3))
    good = np.delete(x, 1, 0)
    np.testing.assert_allclose(metrics["aux"]["mean"], good.mean(), rtol=1e-5)
    got = state.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    if kind == "mean":
        np.testing.assert_allclose(got, 0.5 * good.mean((0, 1)), rtol=1e-5)
    else:
        each = np.where(np.arange(N)[:, None] == 1, 0, 0.5 * x.mean(1))
        np.testing.assert_allclose(got, each, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mean", "per_shard"])
@pytest.mark.parametrize("what", ["loss", "state"])
@pytest.mark.parametrize("action", ["quarantine", "skip"])
def test_what_is_not_finite_beside_finite_gradients_is_named_and_spread_to_nobody(
    action: str, what: str, kind: str
):
    """NaN in a running mean would be on all shards, in every step to come."""
    x = RNG.normal(size=(N, 5)).astype(np.float32)
    mark = np.zeros((N, 5), np.float32)
    mark[1, 2] = np.nan

    def loss(w: Any, seen: Any, batch: Any) -> Any:
        bad = jax.lax.stop_gradient(batch["mark"].sum())
        in_loss, in_state = (bad, 0) if what == "loss" else (0, bad)
        return (w * batch["x"]).mean() + in_loss, {"mean": batch["x"].mean() + in_state}

    step = sgd_step(loss, 1.0, N, model_state=kind, nonfinite=action, loss_over="shard")
    state = step.init(np.float32(3), model_state={"mean": jnp.float32(7)})
    state, metrics = step(state, {"x": x.reshape(-1), "mark": mark.reshape(-1)})
    text = metrics["nonfinite"].describe(state.params, state.model_state)
    named = "the loss" if what == "loss" else "the model state `mean`"
    assert text == f"{named}, but no gradient, is not finite on shard 1"
    assert bool(metrics["skipped"]) == (action == "skip")
    others = np.delete(x, 1, 0)
    if action == "skip":
        assert float(state.params) == 3
        np.testing.assert_array_equal(
            state.model_state["mean"], np.full_like(state.model_state["mean"], 7)
        )
        return
    np.testing.assert_allclose(state.params, 3 - others.mean(), rtol=1e-6)
    if kind == "mean":
        np.testing.assert_allclose(state.model_state["mean"], others.mean(), rtol=1e-6)
    else:
        want = np.where(np.arange(N) == 1, 7, x.mean(1))
        np.testing.assert_allclose(np.ravel(state.model_state["mean"]), want, rtol=1e-5)
    if what == "state":
        # And in the next step nothing is left of it.
        state, metrics = step(state, {"x": x.reshape(-1), "mark": 0 * np.ravel(x)})
        assert int(metrics["nonfinite"].shards) == 0


@pytest.mark.parametrize("action", ["quarantine", "skip", "raise"])
def test_infinities_in_a_model_state_may_be_meant(action: str):
    def loss(w: Any, seen: Any, x: Any) -> Any:
        own = (w * x).mean()
        return own, {"best": jnp.minimum(seen["best"], own), "mask": seen["mask"]}

    step = sgd_step(loss, 1.0, N, model_state="mean", nonfinite=action)
    before = {"best": jnp.float32(np.inf), "mask": jnp.float32([0, -np.inf, np.nan])}
    state = step.init(np.float32(1), model_state=before)
    x = np.ones(N, np.float32)
    for _ in range(3):
        state, _ = step(state, x)
    step.finish(jax.device_get(state))
    assert (int(state.step), float(state.params)) == (3, -2)


@pytest.mark.parametrize("options", [{}, {"loss_scale": "dynamic"}])
def test_virtual_shards_have_a_weight_each(options: Any):
    loss = lambda w, batch: (w * batch["x"] * batch["n"]).sum() / batch["n"].sum()
    batch = {"x": np.arange(16, dtype=np.float32), "n": np.float32(np.arange(16) % 4 > 0)}
    step = sgd_step(loss, 1.0, 2, weight="n", virtual_shards=8, nonfinite="skip", **options)
    state, metrics = step(step.init(np.float32(3)), batch)
    assert int(metrics["nonfinite"].shards) == 0
    want = 3 - (batch["x"] * batch["n"]).sum() / batch["n"].sum()
    np.testing.assert_allclose(state.params, want, rtol=1e-6)


def test_noise_is_that_of_the_others():
    loss = lambda w, x: (w * x).mean()
    names = ("noise_variance", "noise_signal", "local_grad_norm")
    x = RNG.normal(size=(N, 3)).astype(np.float32)
    with_bad = np.insert(x, 2, np.nan, axis=0)

    def measured(x: np.ndarray, **options: Any) -> Any:
        step = sgd_step(loss, 1.0, len(x), metrics=names, **options)
        metrics = step(step.init(np.float32(0)), x.reshape(-1))[1]
        return [float(metrics[name]) for name in names]

    np.testing.assert_allclose(measured(with_bad, nonfinite="quarantine"), measured(x), rtol=1e-5)


def test_with_a_loss_scale_the_shard_is_named_too():
    step = sgd_step(
        lambda w, x: (w.astype(jnp.float32) * x).sum() / len(x),
        1.0,
        2,
        loss_scale=crossshard.DynamicLossScale(2.0**15),
        nonfinite="skip",
    )
    state, metrics = step(step.init(np.ones(2, np.float16)), np.float32([[1, 1], [1, 9]]))
    assert metrics["skipped"]
    assert metrics["nonfinite"].describe(state.params).endswith("on shard 1")
    assert float(state.opt_state.loss_scale.scale) == 2.0**14


# What it costs.


@pytest.mark.parametrize("preprocess", [None, optax.identity()], ids=["plain", "preprocess"])
@pytest.mark.parametrize("action", ["quarantine", "skip"])
def test_a_step_sends_more_only_if_something_is_not_finite(action: str, preprocess: Any):
    opt = optimizer(0.0, nonfinite=action, preprocess=preprocess)
    step = make_train_step(
        loss_fn, opt, num_shards=N, weight_update="replicated", loss_over="shard"
    )
    found = crossshard.inspect(step.lower(step.abstract_init(PARAMS), rows(batch_of(0))))
    # The gradients, and one number that says whether they are finite.
    assert [bool(each.bytes_sent) for each in found.counted] == [True, False]
    rare = [each for each in found.collectives if not each.counted]
    assert all(each.in_branch and not each.in_loop for each in rare)
    # Gradients again, or the report alone. What preprocess reads is looked through before it.
    sent = sum(each.bytes_sent for each in rare) / found.bytes_sent
    assert sent == 0 if preprocess else sent > 1 if action == "quarantine" else 0 < sent < 0.01
    assert "at most" not in str(found)


# Raising.


def make(action: Any, **options: Any) -> Any:
    return sgd_step(loss_fn, RATE, N, nonfinite=action, loss_over="shard", **options)


@pytest.mark.parametrize(
    ("action", "calls", "match"),
    [
        ("raise", [0, 1, 2, 0], "The gradient of `kernel` is not finite on shard 2. "),
        (Nonfinite("skip", 2), [1, 0, 1, 2, 0, 0], "in 2 steps in a row; .*`bias` .* shard 0, and"),
        (Nonfinite("quarantine", 1), [1, 0, 0], "shard 2"),
    ],
)
def test_too_many_in_a_row_raise_and_leave_a_state_that_is_good(
    action: Any, calls: list[int], match: str
):
    step = make(action)
    state = step.init(PARAMS)
    for t in calls[:-1]:
        state, _ = step(state, rows(batch_of(t)))
    with pytest.raises(NonfiniteError, match=match):
        step(state, rows(batch_of(calls[-1])))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    # It is told once, also of the step after it; who goes on may do so.
    for _ in range(3):
        state, _ = step(state, rows(batch_of(0)))
    step.finish(state)


def test_in_a_loop_of_ones_own_the_state_tells():
    step = make("raise")
    batches = jax.tree.map(lambda *x: np.stack(x), *[rows(batch_of(t)) for t in range(3)])
    state, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(step.init(PARAMS), batches)
    np.testing.assert_array_equal(metrics["nonfinite"].in_a_row, IN_A_ROW[:3])
    assert int(state.opt_state.nonfinite.in_a_row) == 2
    step(state, rows(batch_of(0)))


def test_a_state_goes_on_with_another_number_of_shards():
    step = make("skip")
    other = sgd_step(loss_fn, RATE, 2, nonfinite="skip", loss_over="shard")
    state, _ = step(step.init(PARAMS), rows(batch_of(1)))
    state = other.reshard(step.unshard(state))
    assert [int(x) for x in state.opt_state.nonfinite] == [2, 1, 1, 0, 1]
    state, metrics = other(state, rows(batch_of(0)))
    assert int(metrics["nonfinite"].in_a_row) == 0


# What is refused, and what is said.


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "3"])
def test_a_number_that_is_none_of_steps_is_refused(number: Any):
    with pytest.raises(crossshard.CrossshardError, match="max_consecutive must be"):
        Nonfinite("skip", number)


def test_what_contradicts_it_is_refused():
    with pytest.raises(crossshard.errors.ArgumentError, match="leaves a shard out of the mean"):
        CrossShardOptimizer(optax.sgd(0.1), "sum", nonfinite="quarantine")
    for action in ("quarantine", "raise"):
        with pytest.raises(crossshard.errors.ArgumentError, match="Use nonfinite='skip'"):
            make(action, loss_scale="dynamic")
    opt = CrossShardOptimizer(optax.sgd(0.1), nonfinite="raise")
    with pytest.raises(crossshard.errors.ArgumentError, match=r"read state\.nonfinite"):
        opt.update(1.0, opt.init(1.0))


def test_it_is_described():
    assert make("quarantine")._config.describe() == (
        "local gradient → quarantine → weigh → mean over all shards → skip if not finite → update"
    )
    found = crossshard.pipeline.NonfiniteState(3, 1, 2, False, 1)
    assert (
        found.describe(PARAMS) == "the gradient of `kernel` is not finite on shard 3, and on 1 more"
    )
    assert dataclasses.replace(Nonfinite("raise"), max_consecutive=9).max_consecutive == 1


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
@pytest.mark.parametrize("action", ["quarantine", "skip"])
def test_xla_copies_no_array_that_a_skipped_step_keeps(action: str, weight_update: str):
    def loss_fn(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return ((x @ kernel) ** 2).mean()

    kernel = np.zeros((64, 512), np.float32)
    opt = CrossShardOptimizer(optax.adamw(RATE), nonfinite=action)
    step = make_train_step(loss_fn, opt, num_shards=2, weight_update=weight_update)
    lowered = step.lower(step.init(kernel), np.ones((4, 64), np.float32))
    assert not re.findall(r"= f32\[\d+,512\]\S* copy\(.*", lowered.compile().as_text())
