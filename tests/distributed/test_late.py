"""A process that is later than the half minute after which gloo gives up some of what it does."""

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from tests.processes import join, run_processes

LATE = 35
STEPS = 2
START = {"kernel": np.float32(np.random.default_rng(0).normal(size=(64, 48)) / 8)}
X = np.float32(np.random.default_rng(1).normal(size=(4, 64)))


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["kernel"]) - 1) ** 2)


def train(x: np.ndarray, shards: int, late: str) -> list[Any]:
    step = make_train_step(loss_fn, optax.sgd(1.0), num_shards=shards, weight_update="sharded")
    state = step.init(START)
    for number in range(STEPS):
        if late == "compiles" and number == 0:
            # Called when XLA has compiled something: the program of the step, here.
            jax.monitoring.register_event_duration_secs_listener(_wait_after_a_compilation)
        elif late == "steps" and number == 1:
            time.sleep(LATE)
        state, _ = step(state, x)
    return np.asarray(step.model(state)["kernel"]).tolist()


_waited: list[str] = []


def _wait_after_a_compilation(event: str, seconds: float, **_: Any) -> None:
    if "backend_compile" in event and not _waited:
        _waited.append(f"{event}: {seconds}")
        time.sleep(LATE)


def main(process: int, port: int, out: str, late: str) -> None:
    """One process of two, of which the second is late."""
    join(process, port, 2, 1)
    found = train(np.split(X, 2)[process], 2, late if process else "")
    assert len(_waited) == (process == 1 and late == "compiles")
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


@pytest.mark.multiprocess
@pytest.mark.deep
@pytest.mark.parametrize("late", ["compiles", "steps"])
def test_the_others_wait_for_a_process_that(late: str, tmp_path: Path):
    expected = train(X, 1, "")
    for found in run_processes("distributed.test_late", tmp_path, late, processes=2):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
