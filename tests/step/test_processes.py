"""A step over real processes of jax.distributed, each of which gives its own part of the batch."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from tests.processes import DEVICES, PROCESSES, join, run_processes

STEPS = 3
ROWS = 10  # 5 in each process, which 2 devices can only share by padding

_rng = np.random.default_rng(5)
START = {
    "kernel": np.float32(_rng.normal(size=(64, 33)) / 8),
    "odd": np.float32(_rng.normal(size=(41, 29)) / 8),
}
XS = np.float32(_rng.normal(size=(STEPS, ROWS, 64)) + np.linspace(-1, 1, ROWS)[:, None])
MASKS = np.float32(_rng.integers(0, 2, size=(STEPS, ROWS)))


def loss_fn(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    del rng
    error = ((batch["x"] @ params["kernel"] - 1) ** 2).mean(-1) + (params["odd"] ** 2).sum()
    return (error * batch["mask"]).sum() / batch["mask"].sum()


RULES = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "clip + adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01, eps=1e-4)),
}


def train(rule: str, weight_update: str, rows: slice, shards: int) -> Any:
    step = make_train_step(
        loss_fn, RULES[rule](), num_shards=shards, weight_update=weight_update, weight="mask"
    )
    state = step.init(START, 3)
    for x, mask in zip(XS, MASKS, strict=True):
        state, metrics = step(state, {"x": x[rows], "mask": mask[rows]})
    whole = step.unshard(state)
    return {
        "loss": float(metrics["loss"]),
        "params": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(whole.params)],
        "state": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(whole.opt_state)],
    }


BATCH_ROWS = 8  # 2 on each device, since no row is padded


def over_batch(params: Any, stats: Any, batch: Any, rng: jax.Array) -> Any:
    """Standardizes over the rows of all processes, with noise that does not depend on them."""
    out = batch["x"] @ params["kernel"]
    mean, noise = out.mean(0), jax.random.normal(rng, out.shape)
    error = ((out - mean) / (out.std(0) + 0.1) - noise) ** 2 * batch["mask"][:, None]
    loss = error.sum() / batch["mask"].sum() + (params["odd"] ** 2).sum()
    return loss, ({"mean": 0.5 * stats["mean"] + 0.5 * mean}, {"mean": mean, "rows": out[:, 0]})


def train_over_batch(params: str, rows: slice, shards: int) -> Any:
    step = make_train_step(
        over_batch,
        RULES["clip + adam"](),
        num_shards=shards,
        params=params,
        model_state="mean",
        has_aux=True,
        accumulate_steps=2 if params == "sharded" else 1,
        loss_over="batch",
    )
    state = step.init(START, 3, model_state={"mean": np.zeros(33, np.float32)})
    # Each microbatch has every second row of all, and so have the rows of each process.
    for x, mask in zip(XS, MASKS, strict=True):
        state, metrics = step(state, {"x": x[rows], "mask": mask[rows]})
    whole = step.unshard(state)
    values = step.predict(
        state, [{"x": XS[0][rows]}], lambda p, s, b: b["x"] @ p["kernel"] - s["mean"]
    )
    return {
        "loss": float(metrics["loss"]),
        "aux": np.asarray(metrics["aux"]["mean"]).tolist(),
        "params": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(whole.params)],
        "state": np.asarray(whole.model_state["mean"]).tolist(),
        "predicted": values.tolist(),
    }


def main(process: int, port: int, out: str) -> None:
    """One process: train its part and write down what came of it."""
    join(process, port)
    each = ROWS // PROCESSES
    rows = slice(process * each, (process + 1) * each)
    found = {
        f"{rule} {word}": train(rule, word, rows, PROCESSES * DEVICES)
        for rule in RULES
        for word in ("replicated", "sharded")
    }
    each = BATCH_ROWS // PROCESSES
    rows = slice(process * each, (process + 1) * each)
    for word in ("replicated", "sharded"):
        found[f"batch {word}"] = train_over_batch(word, rows, PROCESSES * DEVICES)
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each process found."""
    return run_processes("step.test_processes", tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
@pytest.mark.parametrize("rule", RULES)
def test_processes_step_as_one_device_on_the_whole_batch(
    found: list[Any], rule: str, weight_update: str
):
    expected = train(rule, "replicated", slice(None), 1)
    for each in found:
        got = each[f"{rule} {weight_update}"]
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for key in ("params", "state"):
            for one, other in zip(got[key], expected[key], strict=True):
                np.testing.assert_allclose(one, other, atol=5e-6)


@pytest.mark.parametrize("params", ["replicated", "sharded"])
def test_a_loss_over_the_batch_sees_the_rows_of_all_processes(found: list[Any], params: str):
    expected = train_over_batch(params, slice(0, BATCH_ROWS), 1)
    predicted = expected.pop("predicted")
    own = np.split(np.asarray(predicted), PROCESSES)
    for each, rows in zip(found, own, strict=True):
        got = each[f"batch {params}"]
        np.testing.assert_allclose(got.pop("predicted"), rows, atol=5e-6)
        close = lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=5e-6)
        jax.tree.map(close, got, expected)
