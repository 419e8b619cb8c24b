"""metrics: norms, learning rate and gradient noise, against numpy and against the truth."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from tests.quick import deep
from tests.step.common import sgd_step

N, ROWS, RATE = 4, 8, 0.1
RNG = np.random.default_rng(0)
W = RNG.normal(size=(32, 40)).astype(np.float32)
X = RNG.normal(size=(N, ROWS, 40)).astype(np.float32)
NORMS = ("grad_norm", "local_grad_norm", "update_norm", "param_norm")
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(RATE),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE)),
}


def loss_fn(w: Any, x: Any) -> jax.Array:
    return ((x @ w.T) ** 2).sum(-1).mean() / 2


def gradients() -> np.ndarray:
    """``[shards, …]`` in float64."""
    x, w = np.float64(X), np.float64(W)
    return np.stack([(each @ w.T).T @ each / ROWS for each in x])


@pytest.mark.parametrize(
    ("reduction", "weight_update"),
    [
        *(("mean", "replicated"), ("sum", "sharded")),
        *(deep(("mean", "sharded")), deep(("sum", "replicated"))),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms(name: str, weight_update: str, reduction: str):
    opt = CrossShardOptimizer(OPTIMIZERS[name](), reduction, metrics=NORMS)
    step = make_train_step(loss_fn, opt, num_shards=N, weight_update=weight_update)
    state, metrics = step(step.init(W), X.reshape(-1, 40))
    own = gradients()
    reduced = own.mean(0) if reduction == "mean" else own.sum(0)
    update = -RATE * reduced
    if name == "clipped":
        update = update / np.linalg.norm(reduced)
    want = {
        "grad_norm": np.linalg.norm(reduced),
        "local_grad_norm": np.sqrt((own**2).sum((1, 2)).mean()),
        "update_norm": np.linalg.norm(update),
        "param_norm": np.linalg.norm(W + update),
    }
    for key, value in want.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5)
        assert float(state.opt_state.metrics[key]) == float(metrics[key])


def test_a_skipped_step_moves_nothing():
    step = sgd_step(loss_fn, RATE, N, loss_scale="dynamic", metrics=NORMS)
    x = X.copy()
    x[1, 2, 3] = np.inf
    _, metrics = step(step.init(W), x.reshape(-1, 40))
    assert not np.isfinite(metrics["grad_norm"])
    assert float(metrics["update_norm"]) == 0
    np.testing.assert_allclose(metrics["param_norm"], np.linalg.norm(W), rtol=1e-6)


# The learning rate.

SCHEDULE = optax.linear_schedule(0.3, 0.0, 3)
TELLING = {
    "sgd": lambda: optax.inject_hyperparams(optax.sgd)(SCHEDULE),
    "adam": lambda: optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "behind a clip": lambda: optax.chain(
        optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(SCHEDULE)
    ),
}


@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize("options", [{}, {"ema": 0.9, "master_dtype": "float32"}])
def test_the_learning_rate_is_that_of_the_step(name: str, options: dict[str, Any]):
    step = make_train_step(
        loss_fn, TELLING[name](), num_shards=N, metrics="learning_rate", **options
    )
    state = step.init(W)
    for want in (0.3, 0.2, 0.1):
        state, metrics = step(state, X.reshape(-1, 40))
        np.testing.assert_allclose(metrics["learning_rate"], want, rtol=1e-6)


def test_a_learning_rate_that_is_changed_between_steps():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    step = make_train_step(loss_fn, inner, num_shards=N, metrics="learning_rate")
    state = step.init(W)
    state.opt_state.inner_state.hyperparams["learning_rate"] = jnp.float32(0.25)
    _, metrics = step(state, X.reshape(-1, 40))
    assert float(metrics["learning_rate"]) == 0.25


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        (optax.sgd(0.1), "no learning rate"),
        (optax.sgd(SCHEDULE), "no learning rate"),
        (optax.chain(*[optax.inject_hyperparams(optax.sgd)(0.1)] * 2), "several learning rates"),
    ],
)
def test_a_learning_rate_that_is_not_told_is_refused(inner: Any, told: str):
    step = make_train_step(loss_fn, inner, num_shards=N, metrics="learning_rate")
    with pytest.raises(crossshard.errors.ArgumentError, match=told):
        step.init(W)


def decayed(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def test_a_mask_that_is_taken_for_a_schedule_is_refused():
    # Optax calls it with the number of updates, and then decays nothing.
    params, loss = (
        {"w": jnp.ones((3, 2)), "b": jnp.ones(2)},
        lambda p, x: (x @ p["w"] + p["b"]).mean(),
    )
    told = {"learning_rate": 0.1, "weight_decay": 0.1, "mask": decayed}
    inner = optax.inject_hyperparams(optax.adamw)(**told)
    step = make_train_step(loss, inner, num_shards=N, metrics="learning_rate")
    with pytest.raises(crossshard.errors.ArgumentError, match="static_args='mask'"):
        step.init(params)
    with pytest.raises(crossshard.errors.ArgumentError, match="static_args='mask'"):
        crossshard.CrossShardOptimizer(inner).init(params)
    inner = optax.inject_hyperparams(optax.adamw, static_args="mask")(**told)
    step = make_train_step(loss, inner, num_shards=N, metrics="learning_rate")
    state, metrics = step(step.init(params), np.ones((8, 3), np.float32))
    np.testing.assert_allclose(metrics["learning_rate"], 0.1, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], 1 - 0.1 * 1.1, rtol=1e-5)
    np.testing.assert_allclose(state.params["b"], 1 - 0.1, rtol=1e-5)


def test_a_state_may_hold_numbers_of_pythons():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda g: -state * g, updates), state / 2

    inner = optax.GradientTransformation(lambda params: 0.5, update)
    step = make_train_step(loss_fn, inner, num_shards=N)
    state, _ = step(step.init(W), X.reshape(-1, 40))
    assert float(state.opt_state.inner_state) == 0.25


# Noise.


@pytest.mark.parametrize(
    ("weighted", "accumulate_steps"),
    [(False, 1), (True, 2), deep((False, 2)), deep((True, 1))],
)
def test_the_noise_is_on_average_what_it_is(weighted: bool, accumulate_steps: int):
    # The gradient of one example is a known mean plus noise of a known covariance.
    true, spread = np.array([1.0, -2.0, 0.5]), np.array([3.0, 1.0, 2.0])
    counts = np.array([2, 8, 4, 6]) if weighted else np.full(N, 8)
    # A row of weight 0 is there, and does not count.
    mask = (np.arange(8) < counts[:, None]).astype(np.float32)

    def loss(w: Any, batch: Any) -> jax.Array:
        counted = (batch["x"] @ w) * batch["n"]
        return counted.sum() / jnp.maximum(batch["n"].sum(), 1) if weighted else counted.mean()

    names = ("noise_variance", "noise_signal", "noise_scale")
    step = sgd_step(
        loss,
        0.0,
        N,
        metrics=names,
        accumulate_steps=accumulate_steps,
        weight=(lambda batch: batch["n"].sum()) if weighted else None,
        loss_over="shard",
    )
    state, rng, found = step.init(np.zeros(3, np.float32)), np.random.default_rng(1), []
    for _ in range(600):
        x = (true + spread * rng.normal(size=(N, 8, 3))).astype(np.float32)
        batch = {"x": x.reshape(-1, 3), "n": mask.reshape(-1)}
        state, metrics = step(state, batch)
        found.append([metrics["noise_variance"], metrics["noise_signal"]])
        np.testing.assert_allclose(
            metrics["noise_scale"], metrics["noise_variance"] / metrics["noise_signal"], rtol=1e-5
        )
    variance, signal = np.mean(found, 0)
    assert variance == pytest.approx((spread**2).sum(), rel=0.05)
    assert signal == pytest.approx((true**2).sum(), rel=0.05)


# What they cost.


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_norms_add_no_more_than_numbers(weight_update: str):
    def report(metrics: tuple[str, ...]) -> Any:
        step = sgd_step(loss_fn, RATE, N, weight_update=weight_update, metrics=metrics)
        return crossshard.inspect(step.lower(step.init(W), X.reshape(-1, 40)))

    with_them, without = report(NORMS), report(())
    # Two numbers at most are in a bucket of gradients.
    assert with_them.bytes_sent <= without.bytes_sent + 2 * 4 * 2
    if weight_update == "replicated":
        # The local norm travels with the loss; all else is known on every shard.
        assert len(with_them.collectives) == len(without.collectives)
