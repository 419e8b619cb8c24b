"""Over real processes, state, aux, entries and evaluation are as on one device."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from crossshard.errors import ArgumentError
from tests.processes import DEVICES, PROCESSES, join, run_processes

# Of which each process has half, and 2 devices can only share them by padding.
X = np.random.default_rng(0).normal(size=(3, 10, 4)).astype(np.float32)
MASK = np.arange(10) % 3 > 0
TABLE = np.arange(8, dtype=np.float32).reshape(2, 4)


def loss_fn(params: Any, state: Any, batch: Any) -> Any:
    rows = batch["x"] @ (params["body"] * params["head"]) + batch["table"].sum()
    rows = rows * batch["scale"] - state["mean"]
    counts = batch["mask"].sum()
    mean = (rows * batch["mask"]).sum() / counts
    state = {"mean": 0.5 * (state["mean"] + mean), "steps": state["steps"] + 1}
    return (rows**2 * batch["mask"]).sum() / counts, (state, counts)


def metric(params: Any, state: Any, batch: Any) -> jax.Array:
    return batch["x"] @ params["body"] * batch["scale"] + state["mean"]


def train(rows: slice, shards: int) -> Any:
    step = make_train_step(
        loss_fn,
        optax.sgd(0.01),
        num_shards=shards,
        weight="mask",
        has_aux=True,
        wrt=lambda path, leaf: path[0].key == "head",
        model_state="mean",
        aux_reduction="sum",
        replicated_entries=("scale", "table"),
    )
    whole = {"scale": 1.5, "table": TABLE}
    state = step.init(
        {"body": np.ones(4, np.float32), "head": np.ones(4, np.float32)},
        model_state={"mean": np.float32(0), "steps": 0},
    )
    batches = [{"x": x[rows], "mask": MASK[rows], **whole} for x in X]
    for batch in batches:
        state, metrics = step(state, batch)
    params, kept = step.model(state)
    end = {**batches[2], "x": X[2][rows][:3], "mask": np.ones(3)}
    found = {
        "head": np.asarray(params["head"]).tolist(),
        "mean": float(kept["mean"]),
        "steps": int(kept["steps"]),
        "aux": float(metrics["aux"]),
        "metric": float(step.evaluate(state, [*batches[:2], end], metric)),
    }
    if jax.process_count() > 1:
        other = {**batches[0], "table": np.full((3, 4), jax.process_index(), np.float32)}
        with pytest.raises(ArgumentError, match=r"batch\['table'\].*replicated_entries"):
            step(state, other)
    return found


def main(process: int, port: int, out: str) -> None:
    """One process: train with its part, and write down what came of it."""
    join(process, port)
    each = X.shape[1] // PROCESSES
    found = train(slice(process * each, (process + 1) * each), PROCESSES * DEVICES)
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


def of_one_device() -> Any:
    body, head, mean = np.ones(4), np.ones(4), 0.0
    weights = MASK / MASK.sum()

    def loss(head: Any, x: Any, mean: Any) -> Any:
        rows = (x @ (body * head) + TABLE.sum()) * 1.5 - mean
        return (rows**2 * weights).sum(), (rows * weights).sum()

    for x in X:
        gradient, of_rows = jax.grad(loss, has_aux=True)(jnp.asarray(head), x, mean)
        head, mean = head - 0.01 * gradient, 0.5 * (mean + of_rows)
    counted = [X[0][MASK], X[1][MASK], X[2][[0, 1, 2, 5, 6, 7]]]
    metric = (np.concatenate(counted) @ body * 1.5 + mean).mean()
    return {"head": head, "mean": mean, "steps": 3, "aux": MASK.sum(), "metric": metric}


@pytest.mark.deep
@pytest.mark.multiprocess
def test_what_happens_between_steps(tmp_path: Path):
    expected = of_one_device()
    for found in run_processes("step.test_processes_between_steps", tmp_path):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
