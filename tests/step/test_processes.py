"""Rows that each of several real processes gives: padded there, and predicted there."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from tests.processes import DEVICES, PROCESSES, join, run_processes

ROWS = {"weight": 10, "batch": 8}  # 10: 5 in each process, which 2 devices share by padding.
_rng = np.random.default_rng(5)
START = np.float32(_rng.normal(size=(64, 33)) / 8)
XS = np.float32(_rng.normal(size=(3, 10, 64)) + np.linspace(-1, 1, 10)[:, None])
MASKS = np.float32(_rng.integers(0, 2, size=(3, 10)))


def loss_fn(kernel: Any, batch: Any) -> jax.Array:
    error = ((batch["x"] @ kernel - 1) ** 2).mean(-1)
    return (error * batch["mask"]).sum() / batch["mask"].sum()


def over_batch(kernel: Any, batch: Any, rng: Any) -> Any:
    """Standardizes over the rows of all processes, with noise that does not depend on them."""
    out = batch["x"] @ kernel
    noise = jax.random.normal(rng, out.shape)
    return (((out - out.mean(0)) / (out.std(0) + 0.1) - noise) ** 2).mean()


def train(kind: str, process: int, processes: int, shards: int) -> Any:
    rows = slice(process * ROWS[kind] // processes, (process + 1) * ROWS[kind] // processes)
    if kind == "weight":
        step = make_train_step(loss_fn, optax.sgd(0.1, 0.9), num_shards=shards, weight="mask")
    else:
        options: Any = {"params": "sharded", "accumulate_steps": 2, "loss_over": "batch"}
        step = make_train_step(over_batch, optax.sgd(0.1), num_shards=shards, **options)
    state = step.init(START, 3)
    # Each microbatch has every second row of all, and so have the rows of each process.
    for x, mask in zip(XS, MASKS, strict=True):
        state, metrics = step(state, {"x": x[rows], "mask": mask[rows]})
    values = step.predict(state, [{"x": XS[0][rows]}], lambda kernel, batch: batch["x"] @ kernel)
    whole = np.asarray(step.unshard(state).params)
    return [float(metrics["loss"]), whole.tolist(), values.tolist()]


def main(process: int, port: int, out: str) -> None:
    """One process: train its part and write down what came of it."""
    join(process, port)
    shards = PROCESSES * DEVICES
    found = {kind: train(kind, process, PROCESSES, shards) for kind in ROWS}
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each process found."""
    return run_processes("step.test_processes", tmp_path_factory.mktemp("processes"))


@pytest.mark.deep
@pytest.mark.parametrize("kind", ROWS)
def test_processes_step_as_one_device_on_the_whole_batch(found: list[Any], kind: str):
    loss, params, values = train(kind, 0, 1, 1)
    for each, own in zip(found, np.split(np.asarray(values), PROCESSES), strict=True):
        for got, want in zip(each[kind], (loss, params, own), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-6)
