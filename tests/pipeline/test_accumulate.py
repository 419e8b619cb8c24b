"""accumulate_steps: the gradient of k microbatches, which is reduced once, against numpy."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.step.common import assert_same, on_variables, sgd_step, shard_map_of

N, K, STEPS, RATE = 4, 3, 3, 0.1
RNG = np.random.default_rng(0)
W = RNG.normal(size=3).astype(np.float32)
# float32[steps, microbatches, shards, rows, …]
X = RNG.normal(size=(STEPS, K, N, 2, 3)).astype(np.float32)
Y = RNG.normal(size=(STEPS, K, N, 2)).astype(np.float32)
WEIGHTS = RNG.uniform(0.5, 2, size=(STEPS, K, N)).astype(np.float32)
WEIGHTS[1, 0, 2] = 0
MOMENTA = {"sgd": 0.0, "momentum": 0.9}


def loss_fn(w: Any, batch: Any) -> jax.Array:
    return ((batch["x"] @ w - batch["y"]) ** 2).mean()


def expected(momentum: float, weighted: bool) -> np.ndarray:
    """The parameters after each step, in float64: the gradient of the whole batch, weighed."""
    w, trace, found = np.float64(W), np.zeros(3), []
    for x, y, weights in zip(np.float64(X), np.float64(Y), WEIGHTS, strict=True):
        total = np.zeros(3)
        for k in range(K):
            for shard in range(N):
                gradient = x[k, shard].T @ (x[k, shard] @ w - y[k, shard])
                total += gradient * (weights[k, shard] if weighted else 1)
        trace = momentum * trace + total / (weights.sum() if weighted else N * K)
        w = w - RATE * trace
        found.append(w)
    return np.stack(found)


def optimizer(name: str, **options: Any) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.sgd(RATE, momentum=MOMENTA[name] or None), **options)


def batch_of(step: int) -> dict[str, np.ndarray]:
    """``[microbatches, shards, rows, …]``; NaN where the weight is 0."""
    x = np.where(WEIGHTS[step, ..., None, None] > 0, X[step], np.nan)
    return {"x": x, "y": Y[step], "weight": WEIGHTS[step][..., None].repeat(2, -1) / 2}


def weight_of(batch: Any) -> jax.Array:
    return batch["weight"].sum()


def calls() -> Any:
    """The batch of each call, with the number of its step and of its microbatch."""
    for t in range(STEPS):
        for k in range(K):
            yield t, k, jax.tree.map(lambda x, k=k: x[k], batch_of(t))


@pytest.mark.parametrize("name", MOMENTA)
@pytest.mark.parametrize(("weighted", "check_vma"), [(True, True), (False, False)])
def test_k_calls_are_one_step(name: str, weighted: bool, check_vma: bool):
    opt = optimizer(name, accumulate_steps=K)
    init, step = shard_map_of(opt, loss_fn, W, N, check_vma, weight_of if weighted else None)
    w, state = init(W)
    want = expected(MOMENTA[name], weighted)
    for t, k, batch in calls():
        before = w, state.inner_state
        w, state = step((w, state), batch if weighted else {"x": X[t, k], "y": Y[t, k]})
        if k < K - 1:
            assert int(state.accumulate.count) == k + 1
            assert_same((w, state.inner_state), before)
        else:
            assert not any(np.any(x) for x in jax.tree.leaves(state.accumulate))
            np.testing.assert_allclose(w, want[t], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", MOMENTA)
@pytest.mark.parametrize("weighted", [False, True])
def test_microbatches_of_a_step(name: str, weighted: bool):
    weight = weight_of if weighted else None
    step = make_train_step(
        loss_fn, optimizer(name), num_shards=N, accumulate_steps=K, weight=weight, loss_over="shard"
    )
    state, want = step.init(W), expected(MOMENTA[name], weighted)
    for t in range(STEPS):
        batch = batch_of(t) if weighted else {"x": X[t], "y": Y[t]}
        rows = {key: np.moveaxis(x, 0, 1).reshape(-1, *x.shape[3:]) for key, x in batch.items()}
        state, metrics = step(state, rows)
        np.testing.assert_allclose(state.params, want[t], rtol=0, atol=2e-6)
        if weighted:
            np.testing.assert_allclose(metrics["weight"], WEIGHTS[t].sum(), rtol=1e-6)


@pytest.mark.parametrize("name", MOMENTA)
def test_variables_and_their_global_step(name: str):
    opt, want = optimizer(name, accumulate_steps=K), expected(MOMENTA[name], True)
    loss = lambda params, batch: loss_fn(params["w"], batch)
    batches = (batch for _, _, batch in calls())
    found = on_variables(opt, loss, {"w": W}, batches, weigh=weight_of)
    for (t, k, _), (params, _, count) in zip(calls(), found, strict=True):
        assert count == t + (k == K - 1)
        if k == K - 1:
            np.testing.assert_allclose(params["w"], want[t], rtol=0, atol=2e-6)


def test_only_the_last_call_sends_read_from_the_program():
    def text(opt: CrossShardOptimizer) -> str:
        init, step = shard_map_of(opt, loss_fn, W, N, False, None)
        return step.lower(init(W), {"x": X[0, 0], "y": Y[0, 0]}).compile().as_text()

    always = text(optimizer("sgd"))
    sometimes = text(optimizer("sgd", accumulate_steps=K))
    reductions = lambda text: re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
    assert len(reductions(sometimes)) == 2
    assert len(reductions(always)) == 1
    entry = sometimes[sometimes.index("\nENTRY") :]
    # Each call asks how many calls most shards have counted.
    assert [kind.split("{")[0] for kind in reductions(entry)] == [f"s32[{N}]"]
    assert " conditional(" in entry


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_a_step_sends_as_much_as_without_microbatches(weight_update: str):
    params, x = {"w": np.zeros((64, 32), np.float32)}, np.ones((N * 8, 64), np.float32)

    def collectives(**options: Any) -> Any:
        step = make_train_step(
            lambda p, x: ((x @ p["w"]) ** 2).mean(),
            optimizer("sgd"),
            num_shards=N,
            weight_update=weight_update,
            **options,
        )
        report = crossshard.inspect(step.lower(step.init(params), x))
        return sorted((each.kind, each.bytes_sent, each.times) for each in report.collectives)

    assert collectives(accumulate_steps=4) == collectives()


def test_random_keys_and_statistics_are_those_of_small_steps():
    class Normed(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
            self.w = nnx.Param(jnp.asarray(W))

    def loss(model: Any, batch: Any, rng: Any) -> Any:
        out = model.norm(batch["x"]) @ model.w[...]
        return (out**2).mean(), jax.random.uniform(rng)

    def stepped(**options: Any) -> Any:
        # A learning rate of 0, so that small steps and microbatches see the same parameters.
        return sgd_step(loss, 0.0, N, has_aux=True, loss_over="shard", **options)

    whole, small = stepped(accumulate_steps=K), stepped()
    rows = {"x": np.moveaxis(X[0], 0, 1).reshape(-1, 3)}
    at_once, metrics = whole(whole.init(Normed()), rows)
    state, draws = small.init(Normed()), []
    for k in range(K):
        state, each = small(state, {"x": X[0, k].reshape(-1, 3)})
        draws.append(each["aux"])
    np.testing.assert_array_equal(metrics["aux"], np.stack(draws, 1))
    assert len(np.unique(draws)) == N * K
    for a, b in zip(
        jax.tree.leaves(at_once.model_state), jax.tree.leaves(state.model_state), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_step_without_weight_among_its_microbatches_changes_nothing():
    opt = optimizer("momentum", accumulate_steps=2)
    init, step = shard_map_of(opt, loss_fn, W, N, True, weight_of)
    w, state = init(W)
    for t in range(2):
        nothing = {**batch_of(t), "weight": np.zeros((K, N, 2), np.float32)}
        nothing["x"] = np.full_like(nothing["x"], np.nan)
        w, state = step((w, state), jax.tree.map(lambda x: x[0], nothing))
    np.testing.assert_array_equal(w, W)
    assert not np.any(optax.tree.get(state, "trace"))
    assert not any(np.any(x) for x in jax.tree.leaves(state.accumulate))
