"""metrics: learning rates that are told, or not, and the noise on average.

What the norms and the noise of a gradient are hold the combinations, by their factor `metrics`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError
from tests.quick import deep
from tests.step.common import sgd_step

N, RATE = 4, 0.1
RNG = np.random.default_rng(0)
W = RNG.normal(size=(32, 40)).astype(np.float32)
X = RNG.normal(size=(N * 8, 40)).astype(np.float32)
SCHEDULE = optax.linear_schedule(0.3, 0.0, 3)
TELLING = {
    "sgd": lambda: optax.inject_hyperparams(optax.sgd)(SCHEDULE),
    "behind a clip": lambda: optax.chain(
        optax.clip(1.0), optax.inject_hyperparams(optax.adam)(SCHEDULE)
    ),
}


def loss_fn(w: Any, x: Any) -> jax.Array:
    return ((x @ w.T) ** 2).sum(-1).mean() / 2


@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize("options", [{}, {"ema": 0.9, "master_dtype": "float32"}])
def test_the_learning_rate_is_that_of_the_step(name: str, options: dict[str, Any]):
    step = make_train_step(
        loss_fn, TELLING[name](), num_shards=N, metrics="learning_rate", **options
    )
    state = step.init(W)
    for want in (0.3, 0.2, 0.1):
        state, metrics = step(state, X)
        np.testing.assert_allclose(metrics["learning_rate"], want, rtol=1e-6)


def test_a_learning_rate_that_is_changed_between_steps():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    step = make_train_step(loss_fn, inner, num_shards=N, metrics="learning_rate")
    state = step.init(W)
    state.opt_state.inner_state.hyperparams["learning_rate"] = jnp.float32(0.25)
    assert float(step(state, X)[1]["learning_rate"]) == 0.25


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        (optax.sgd(SCHEDULE), "no learning rate"),
        (optax.chain(*[optax.inject_hyperparams(optax.sgd)(0.1)] * 2), "several learning rates"),
    ],
)
def test_a_learning_rate_that_is_not_told_is_refused(inner: Any, told: str):
    step = make_train_step(loss_fn, inner, num_shards=N, metrics="learning_rate")
    with pytest.raises(ArgumentError, match=told):
        step.init(W)


def test_a_mask_that_is_taken_for_a_schedule_is_refused():
    # Optax calls it with the number of updates, and then decays nothing.
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    told = {"learning_rate": 0.1, "weight_decay": 0.1, "mask": mask}
    inner = optax.inject_hyperparams(optax.adamw)(**told)
    with pytest.raises(ArgumentError, match="static_args='mask'"):
        CrossShardOptimizer(inner).init(params)
    inner = optax.inject_hyperparams(optax.adamw, static_args="mask")(**told)
    loss = lambda p, x: (x @ p["w"] + p["b"]).mean()
    step = make_train_step(loss, inner, num_shards=N, metrics="learning_rate")
    state, metrics = step(step.init(params), np.ones((8, 3), np.float32))
    np.testing.assert_allclose(metrics["learning_rate"], 0.1, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], 1 - 0.1 * 1.1, rtol=1e-5)
    np.testing.assert_allclose(state.params["b"], 1 - 0.1, rtol=1e-5)


@pytest.mark.parametrize(
    ("weighted", "accumulate_steps", "loss_over"),
    # Of rows, a ratio with a bound is a ``Mean``, which weighs its gradients itself.
    [(False, 1, "shard"), deep((True, 2, "shard")), (True, 1, "rows"), deep((True, 2, "rows"))],
)
def test_the_noise_is_on_average_what_it_is(weighted: bool, accumulate_steps: int, loss_over: str):
    # The gradient of one example is a known mean plus noise of a known covariance.
    true, spread = np.array([1.0, -2.0, 0.5]), np.array([3.0, 1.0, 2.0])
    counts = np.array([2, 8, 4, 6]) if weighted else np.full(N, 8)
    # A row of weight 0 is there, and does not count.
    mask = (np.arange(8) < counts[:, None]).astype(np.float32)

    def loss(w: Any, batch: Any) -> jax.Array:
        counted = (batch["x"] @ w) * batch["n"]
        return counted.sum() / jnp.maximum(batch["n"].sum(), 1) if weighted else counted.mean()

    step = sgd_step(
        loss,
        0.0,
        N,
        metrics=("noise_variance", "noise_signal", "noise_scale"),
        accumulate_steps=accumulate_steps,
        weight=(lambda batch: batch["n"].sum()) if weighted else None,
        loss_over=loss_over,
    )
    state, rng, found = step.init(np.zeros(3, np.float32)), np.random.default_rng(1), []
    for _ in range(600):
        x = (true + spread * rng.normal(size=(N, 8, 3))).astype(np.float32)
        state, metrics = step(state, {"x": x.reshape(-1, 3), "n": mask.reshape(-1)})
        found.append([metrics["noise_variance"], metrics["noise_signal"]])
        scale = metrics["noise_variance"] / metrics["noise_signal"]
        np.testing.assert_allclose(metrics["noise_scale"], scale, rtol=1e-5)
    variance, signal = np.mean(found, 0)
    assert variance == pytest.approx((spread**2).sum(), rel=0.05)
    assert signal == pytest.approx((true**2).sum(), rel=0.05)


@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.1),
        optax.adam(0.1, eps=0.0),
        optax.stateless(lambda g, p: jax.tree.map(lambda g: -1e-4 / (jnp.abs(g) + 1e-5), g)),
    ],
)
def test_the_padding_of_slices_is_in_no_norm(inner: Any):
    x = np.random.default_rng(0).normal(size=(8, 1031)).astype(np.float32) + 0.5

    def loss(v: Any, x: Any) -> Any:
        return ((x @ v - 1) ** 2).mean()

    v = jnp.full(1031, 0.01)
    updates, _ = inner.update(jax.grad(loss)(v, x), inner.init(v), v)
    names = ("update_norm", "param_norm")
    step = make_train_step(loss, inner, num_shards=N, weight_update="sharded", metrics=names)
    _, metrics = step(step.init(v), x)
    np.testing.assert_allclose(metrics["update_norm"], optax.global_norm(updates), rtol=1e-4)
    np.testing.assert_allclose(metrics["param_norm"], optax.global_norm(v + updates), rtol=1e-4)


def test_beside_a_regulariser_a_shards_gradient_is_that_of_its_part():
    """Times the number of shards: no weight is that of all of it."""
    mask = (np.arange(8 * N) % 8 < 1 + np.arange(8 * N) // 8).astype(np.float32)
    mean = lambda w, batch: crossshard.Mean(
        ((w * batch["x"]).sum(1) ** 2 * batch["mask"]).sum(), batch["mask"].sum()
    )
    loss = lambda w, batch: mean(w, batch) + (w**2).sum()
    step = sgd_step(loss, RATE, N, metrics=("local_grad_norm",))
    _, metrics = step(step.init(W[0]), {"x": X, "mask": mask})
    each = 2 * (X @ W[0])[:, None] * X * mask[:, None]
    parts = N * each.reshape(N, 8, -1).sum(1) / mask.sum() + 2 * W[0]
    want = (parts**2).sum(1).mean() ** 0.5
    np.testing.assert_allclose(metrics["local_grad_norm"], want, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, deep({"params": "sharded", "accumulate_steps": 2})])
def test_a_mean_weighs_each_shards_gradient_by_its_count(options: dict[str, Any]):
    """As numpy does, whose rows have gradients of their own, and not all of them count."""
    counts = np.zeros((N, 8), np.float32)
    for shard, number in enumerate((8, 5, 1, 0)):
        counts[shard, :number] = 1
    rows = lambda w, batch: (w[0] * batch["x"]).sum(1) ** 2 * batch["mask"] / 2
    mean = lambda w, batch: crossshard.Mean(rows(w, batch).sum(), batch["mask"].sum())
    names = ("grad_norm", "local_grad_norm", "noise_variance", "noise_signal")
    step = sgd_step(mean, RATE, N, metrics=names, **options)
    _, metrics = step(step.init(W), {"x": X, "mask": counts.ravel()})
    each = (X @ W[0])[:, None] * X
    own = [(each[i * 8 : i * 8 + 8] * counts[i, :, None]).sum(0) for i in range(N)]
    number, total = counts.sum(1), counts.sum()
    reduced = (np.sum(own, 0) / total) @ (np.sum(own, 0) / total)
    local = sum(g @ g / n for g, n in zip(own, number, strict=True) if n) / total
    variance = (local - reduced) * total / ((number > 0).sum() - 1)
    want = reduced**0.5, local**0.5, variance, reduced - variance / total
    np.testing.assert_allclose([float(metrics[name]) for name in names], want, rtol=1e-4)
