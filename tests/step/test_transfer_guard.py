"""Under jax.transfer_guard("disallow"), a step moves what it is given, and nothing else."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from crossshard import Nonfinite, make_train_step

X = np.ones((13, 3), np.float32)


@pytest.fixture(autouse=True)
def guarded() -> Any:
    with jax.transfer_guard("disallow"):
        yield


def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
    noise = jax.random.uniform(rng) + stats["mean"]
    rows = (batch["x"] @ params["w"] + params["b"]) * batch["scale"]
    loss = (rows * batch["mask"]).sum() / batch["mask"].sum() + 0 * noise
    return loss, {"mean": 0.9 * stats["mean"]}


def test_init_step_and_evaluate():
    step = make_train_step(
        loss_fn,
        optax.adam(0.1),
        num_shards=8,
        weight=lambda batch: batch["mask"].sum(),
        model_state="per_shard",
        replicated_entries=["scale"],
        ema=0.9,
        nonfinite=Nonfinite("skip", max_consecutive=3),
    )
    params = {"w": np.ones(3, np.float32), "b": 0.5}
    state = step.init(params, model_state={"mean": 1.0})
    rows: Any = {"x": X, "mask": X[:, 0]}
    metric = lambda params, stats, batch: batch["x"] @ params["w"] + stats["mean"]
    for given in (rows, jax.device_put(rows)):  # padded on the host, and on a device
        for scale in (1.0, 2.0):
            state, metrics = step(state, {**given, "scale": scale})
        assert np.isfinite(step.evaluate(state, [{**given, "scale": 1.0}], metric, ema=True))
    step.model(state, shard=3)
    step.finish(state)
    assert jax.device_get(metrics["nonfinite"].in_a_row) == 0
