"""predict: the values of all rows of a data set in their order, as numpy computes them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError
from tests.step.common import sgd_step

X = np.random.default_rng(0).normal(size=(45, 4)).astype(np.float32)
W = np.arange(4, dtype=np.float32)
PIECES = [X[:16], X[16:19], X[19:45]]


def loss_fn(w: Any, batch: Any) -> jax.Array:
    return ((batch["x"] @ w) ** 2).mean() * batch["scale"]


def outputs_of(w: Any, batch: Any) -> dict[str, jax.Array]:
    out = batch["scale"] * batch["x"] @ w
    return {"out": out, "half": out.astype(jnp.bfloat16), "right": out > 0, "x": batch["x"]}


def test_the_rows_of_all_batches_in_their_order():
    step = sgd_step(loss_fn, 0.1, 8, replicated_entries=["scale"])
    state = step.init(W)
    batches = [{"x": piece, "scale": 2.0} for piece in PIECES]
    with jax.transfer_guard("disallow"):
        found = step.predict(state, iter(batches), outputs_of)
    out = 2 * X @ W
    np.testing.assert_allclose(found["out"], out, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["x"], X)
    np.testing.assert_array_equal(found["right"], out > 0)
    assert {name: (type(x), x.dtype) for name, x in found.items()} == {
        "out": (np.ndarray, np.float32),
        "half": (np.ndarray, jnp.bfloat16),
        "right": (np.ndarray, bool),
        "x": (np.ndarray, np.float32),
    }


def test_on_a_second_axis_and_rows_that_lie_on_the_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    by = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    loss = lambda w, x: ((x @ w) ** 2).mean()
    step = make_train_step(loss, optax.sgd(0.1), mesh=mesh, axis_name="data")
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    state = step.init(jax.device_put(w, by(None, "model")))
    placed = jax.device_put(X[:16], by(("data",)))
    found = step.predict(state, [placed, X[16:]], lambda w, x: x @ w)
    np.testing.assert_allclose(found, X @ w, rtol=1e-5, atol=1e-5)


def test_of_the_average_a_shard_and_with_state():
    class Counted(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(W))
            self.seen = nnx.BatchStat(jnp.float32(0))

        def __call__(self, x: Any) -> Any:
            self.seen[...] += x.sum()
            return x @ self.w[...] + self.seen[...]

    step = sgd_step(lambda m, x: m(x).mean(), 1.0, 8, ema=0.5, loss_over="shard")
    state, _ = step(step.init(Counted()), X[:40])
    predict = lambda model, x: x @ model.w[...] + model.seen[...]
    seen = X[:40].reshape(8, 5, 4).sum((1, 2))
    after = W - X[:40].mean(0)
    for options, w, stats in (
        ({}, after, seen.mean()),
        ({"ema": True}, (W + after) / 2, seen.mean()),
        ({"shard": 3}, after, seen[3]),
    ):
        found = step.predict(state, PIECES, predict, **options)
        np.testing.assert_allclose(found, X @ w + stats, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("batches", "predict", "error", "said"),
    [
        (
            [X],
            lambda w, x: (x @ w).mean(),
            ArgumentError,
            r"value has shape \(\).*Leave out",
        ),
        ([X], lambda w, x: {}, ArgumentError, "nothing"),
        ([X], "outputs", ArgumentTypeError, "predict_fn must be a function"),
    ],
)
def test_what_cannot_be_predicted(batches: Any, predict: Any, error: type, said: str):
    step = sgd_step(lambda w, x: (x @ w).mean(), 0.1, 8)
    with pytest.raises(error, match=said):
        step.predict(step.init(W), batches, predict)
