"""loss_scale: a step that overflows is skipped on all shards, against a loop in numpy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, DynamicLossScale, make_train_step
from tests.pipeline.ways import IN_ONES_OWN
from tests.step.common import assert_same, sgd_step

N, K, STEPS, RATE, DECAY = 4, 2, 8, 0.1, 0.9
GROUPS = [[0, 2], [1, 3]]
RNG = np.random.default_rng(0)
W = RNG.normal(size=(32, 40)).astype(np.float32)
# float32[steps, shards, microbatches, rows, …]
X = RNG.normal(size=(STEPS, N, K, 2, 40)).astype(np.float32) / 6
# One microbatch of one shard is infinite in these steps.
BAD = {2: (1, 0), 3: (3, 1), 6: (0, 1)}
for _step, (_shard, _microbatch) in BAD.items():
    X[_step, _shard, _microbatch, 1, 3] = np.inf
SCALE = DynamicLossScale(initial=8.0, growth_interval=2, growth_factor=4.0, backoff_factor=0.5)
# By hand: after two good steps four times as much; half of it when a step is skipped.
SCALES = [8, 8, 32, 16, 8, 8, 32, 16, 16]
GOOD_STEPS = [0, 1, 0, 0, 0, 1, 0, 0, 1]
MOMENTA = {"sgd": 0.0, "momentum": 0.9}


def loss_fn(w: Any, x: Any) -> jax.Array:
    return ((x @ w.T - 1) ** 2).sum(-1).mean()


def gradient_of(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    x = np.float64(x).reshape(-1, 40)
    return 2 * (x @ w.T - 1).T @ x / len(x)


@functools.cache
def expected(momentum: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parameters, their average and the preprocessor's traces after each step, in float64."""
    w = ema = np.float64(W)
    trace, traces, found = np.zeros_like(w), np.zeros((N, *w.shape)), []
    for t in range(STEPS):
        if t not in BAD:
            traces = np.stack([0.5 * traces[s] + gradient_of(w, X[t, s]) for s in range(N)])
            trace = momentum * trace + traces.mean(0)
            w = w - RATE * trace
            ema = DECAY * ema + (1 - DECAY) * w
        found.append((w, ema, traces))
    return tuple(map(np.stack, zip(*found, strict=True)))  # type: ignore[return-value]


def optimizer(name: str, **options: Any) -> CrossShardOptimizer:
    inner = optax.sgd(RATE, momentum=MOMENTA[name] or None)
    return CrossShardOptimizer(inner, preprocess=optax.trace(0.5), **options)


OPTIONS: dict[str, Any] = {
    "loss_scale": SCALE,
    "ema": DECAY,
    "metrics": ("grad_norm", "param_norm"),
}


def check(t: int, name: str, w: Any, state: Any) -> None:
    """The parameters and the state after a step."""
    params, ema, traces = (x[t] for x in expected(MOMENTA[name]))
    found = optax.tree.get(state.inner_state, "ema"), jax.tree.map(np.asarray, state.preprocess)
    (got_ema,), (got_traces,) = map(jax.tree.leaves, found)
    np.testing.assert_allclose(w, params, rtol=0, atol=2e-5)
    np.testing.assert_allclose(got_ema, ema, rtol=0, atol=2e-5)
    np.testing.assert_allclose(got_traces.reshape(traces.shape), traces, rtol=0, atol=2e-5)
    assert float(state.loss_scale.scale) == SCALES[t + 1]
    assert int(state.loss_scale.good_steps) == GOOD_STEPS[t + 1]
    assert np.isfinite(state.metrics["grad_norm"]) == (t not in BAD)
    np.testing.assert_allclose(state.metrics["param_norm"], np.linalg.norm(params), rtol=1e-5)


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
@pytest.mark.parametrize("name", MOMENTA)
def test_an_infinity_in_one_microbatch_of_one_shard_skips_exactly_that_step(
    name: str, weight_update: str
):
    step = make_train_step(
        loss_fn,
        optimizer(name),
        num_shards=N,
        weight_update=weight_update,
        accumulate_steps=K,
        **OPTIONS,
    )
    state = step.init(W)
    for t in range(STEPS):
        kept = jax.tree.map(np.array, state)
        state, metrics = step(state, X[t].reshape(-1, 40))
        assert bool(metrics["skipped"]) == (t in BAD)
        assert float(metrics["loss_scale"]) == SCALES[t]
        assert int(state.step) == int(kept.step) + (t not in BAD)
        check(t, name, state.params, state.opt_state)
        if t in BAD:
            old, new = kept.opt_state, state.opt_state
            assert_same(
                (kept.params, old.inner_state, old.preprocess),
                (state.params, new.inner_state, new.preprocess),
            )
            # On every shard, not on average.
            for shard in state.params.addressable_shards:
                np.testing.assert_array_equal(shard.data, kept.params)


@pytest.mark.parametrize(
    ("way", "name"),
    [("types", "momentum"), ("no types", "momentum"), *(("variables", name) for name in MOMENTA)],
)
def test_in_code_of_ones_own(way: str, name: str):
    loss = lambda params, x: loss_fn(params["w"], x.reshape(-1, 40))
    before = W
    calls = IN_ONES_OWN[way](optimizer(name, **OPTIONS), loss, {"w": W}, X)
    for t, (params, state, *count) in enumerate(calls):
        check(t, name, params["w"], state)
        if t in BAD:
            assert_same(before, params["w"])
        assert count in ([], [sum(s not in BAD for s in range(t + 1))])
        before = np.array(params["w"])
    assert t == STEPS - 1


def test_all_groups_skip_and_have_one_scale():
    opt = CrossShardOptimizer(optax.sgd(RATE), group_assignment=GROUPS)
    step = make_train_step(loss_fn, opt, num_shards=N, accumulate_steps=K, loss_scale=SCALE)
    state = step.init(W)
    want = np.stack([np.float64(W)] * N)
    for t in range(STEPS):
        state, metrics = step(state, X[t].reshape(-1, 40))
        assert np.asarray(metrics["skipped"]).tolist() == [t in BAD] * N
        if t not in BAD:
            for group in GROUPS:
                mean = np.mean([gradient_of(want[s], X[t, s]) for s in group], 0)
                want[group] = want[group] - RATE * mean
        np.testing.assert_allclose(state.params, want, rtol=0, atol=2e-5)
        scales = {float(x.data) for x in state.opt_state.loss_scale.scale.addressable_shards}
        assert scales == {SCALES[t + 1]}


def test_small_gradients_are_kept_and_large_ones_found_in_float16():
    # Of 2e-8, float16 makes 0; scaled by 1024 it is a number. Scaled by 2 ** 18, 1 is infinite.
    loss = lambda w, x: (w.astype(jnp.float32) * x).sum() / len(x)
    small, one = np.full((N, 2), 2e-8, np.float32), np.ones((N, 2), np.float32)

    def moved(loss_scale: Any, x: np.ndarray) -> Any:
        step = sgd_step(loss, 1e6, N, loss_scale=loss_scale, master_dtype="float32")
        state, metrics = step(step.init(np.ones(2, np.float16)), x)
        return np.asarray(optax.tree.get(state.opt_state, "masters")) - 1, metrics

    assert np.all(moved(None, small)[0] == 0)
    np.testing.assert_allclose(moved(DynamicLossScale(1024.0), small)[0], -0.02, rtol=1e-2)
    change, metrics = moved(DynamicLossScale(2.0**18), one)
    assert np.all(change == 0)
    assert metrics["skipped"]


@pytest.mark.parametrize("option", [{"loss_scale": "dynamic"}, {"nonfinite": "skip"}])
def test_a_weightless_infinity_does_not_count(option: dict[str, str]):
    step = sgd_step(
        lambda w, b: (w * b["x"]).mean(),
        1.0,
        2,
        weight=lambda b: b["n"].sum(),
        loss_over="shard",
        **option,
    )
    batch = {"x": np.float32([1, 1, np.inf, np.nan]), "n": np.float32([1, 1, 0, 0])}
    state, metrics = step(step.init(np.float32(3)), batch)
    assert not metrics["skipped"]
    assert float(state.params) == 2
    assert "nonfinite" not in option or int(metrics["nonfinite"].shards) == 0
    # No weight at all says nothing about the scale, or about a shard.
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, {**batch, "n": np.zeros(4, np.float32)})
    assert metrics["skipped"]
    assert_same(before, state)


def test_the_scale_stays_finite_and_above_zero():
    step = sgd_step(
        lambda w, x: (w * x).mean(),
        0.0,
        2,
        loss_scale=DynamicLossScale(2.0**119, growth_interval=1),
    )
    state = step.init(np.float32(1e-30))
    for _ in range(4):
        state, metrics = step(state, np.full(2, 1e-30, np.float32))
    assert float(metrics["loss_scale"]) == 2.0**120
    assert not metrics["skipped"]


def test_value_and_gradient_are_those_of_the_loss_without_its_scale():
    value, gradient = crossshard.value_and_grad(jnp.square, loss_scale=8.0)(3.0)
    assert (float(value), float(gradient)) == (9.0, 6.0)


def test_the_state_of_a_scale_that_is_off_scales_nothing():
    state = CrossShardOptimizer(optax.sgd(1.0)).init(W)
    assert state.loss_scale == ()
    value, gradient = crossshard.value_and_grad(jnp.square, loss_scale=state.loss_scale)(3.0)
    assert (float(value), float(gradient)) == (9.0, 6.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"initial": 0.0},
        {"initial": float("inf")},
        {"initial": float("nan")},
        {"initial": 1e39},
        {"initial": 1e-46},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"growth_interval": float("inf")},
        {"growth_interval": 2**31},
        {"growth_factor": 0.5},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
    ],
)
def test_numbers_that_make_no_scale_are_refused(bad: dict[str, float]):
    with pytest.raises(crossshard.errors.ArgumentError, match=next(iter(bad))):
        DynamicLossScale(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["initial", "growth_interval", "growth_factor", "backoff_factor"])
@pytest.mark.parametrize("bad", ["8", None, True, [8.0], np.ones(2)])
def test_what_is_no_number_is_named(name: str, bad: Any):
    with pytest.raises(
        crossshard.errors.ArgumentTypeError, match=f"{name} of DynamicLossScale must be a number"
    ):
        DynamicLossScale(**{name: bad})


def test_numbers_of_numpy_make_a_scale():
    scale = DynamicLossScale(np.float32(8), growth_interval=np.int64(2))
    assert float(scale.init(None).scale) == 8.0


def test_gradients_that_are_summed_in_a_loop_are_scaled_in_every_microbatch():
    layers = np.float32(RNG.normal(size=(2, 192, 192)) / 16)
    rows = np.float32(RNG.normal(size=(16, 192)))

    def loss(w: Any, x: Any) -> jax.Array:
        return (jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2).mean()

    scale = DynamicLossScale(initial=1024.0)
    step = sgd_step(loss, 1.0, 4, accumulate_steps=2, loss_scale=scale)
    state, _ = step(step.init(layers), rows)
    want = layers - jax.grad(loss)(jnp.asarray(layers), rows)
    np.testing.assert_allclose(state.params, want, rtol=0, atol=1e-6)
