"""Several processes train, save and resume sharded parameters."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from crossshard import Checkpoints, make_train_step
from crossshard.errors import ArgumentError
from tests.processes import join, run_processes
from tests.step.common import assert_close, on_one_device, train

pytestmark = pytest.mark.multiprocess

RNG = np.random.default_rng(0)
# Between processes on CPUs a matrix must be large to be gathered by itself.
PARAMS = {
    "large": np.float32(RNG.normal(size=(1024, 1024)) / 32),
    "few": np.float32(RNG.normal(size=(64, 32)) / 8),
    "bias": np.zeros(3, np.float32),
}
BATCHES = np.float32(RNG.normal(size=(4, 16, 1024)))


def loss_fn(params: Any, x: Any) -> jax.Array:
    of_others = ((params["few"] - 1) ** 2).mean() + (params["bias"] - 1).sum() ** 2
    return ((jax.numpy.tanh(x @ params["large"]) - 1) ** 2).mean() + of_others


def optimizer() -> Any:
    return optax.sgd(0.1, 0.9)


def step_of(number: int, **options: Any) -> Any:
    return make_train_step(loss_fn, optimizer(), num_shards=number, ema=0.9, **options)


def main(process: int, port: int, out: str, folder: str) -> None:
    """One process: train, save, go on, and take over a model that is split already."""
    join(process, port)
    rows, step = slice(process * 8, (process + 1) * 8), step_of(4, params="sharded")
    state = step.init(PARAMS)
    said: dict[str, Any] = {
        "pieces": [x.data.shape for x in state.params["large"].addressable_shards]
    }
    # Made in parts by all processes together: no one has all of it.
    sharding = jax.tree.map(lambda x: x.sharding, state.params)
    whole = jax.jit(lambda: jax.tree.map(jax.numpy.asarray, PARAMS), out_shardings=sharding)()
    again = step.init(whole)
    said["again"] = step.replay(again, BATCHES[0][rows]) == {}
    state = train(step, again, [x[rows] for x in BATCHES[:2]])
    said["mean"] = float(step.evaluate(state, [BATCHES[2][rows]], per_row))
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.save(state, {"at": 2})
    state = train(step, state, [x[rows] for x in BATCHES[2:]])
    # What one process would do with other parameters.
    try:
        step.init({**PARAMS, "bias": np.full(3, process, np.float32)})
    except ArgumentError as error:
        said["refused"] = str(error)
    final = step.unshard(state)
    Path(out).write_text(json.dumps(said))
    if process == 0:
        np.savez(Path(out).with_suffix(".npz"), **final.params)
    jax.distributed.shutdown()


def per_row(params: Any, x: Any) -> Any:
    return (jax.numpy.tanh(x @ params["large"]) ** 2).mean(1)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    base = tmp_path_factory.mktemp("in-parts")
    return base, run_processes("checkpoints.test_processes_in_parts", base, base / "run")


def test_two_processes_follow_one_device(found: Any):
    base, said = found
    assert [each["pieces"] for each in said] == [[[256, 1024]] * 2] * 2
    assert all(each["again"] for each in said)
    assert all("process 1 passed" in each["refused"] for each in said)
    want, _ = on_one_device(loss_fn, optimizer(), PARAMS, BATCHES)
    with np.load(base / "0.npz") as got:
        assert_close(dict(got), want, 2e-6)
    at_two, _ = on_one_device(loss_fn, optimizer(), PARAMS, BATCHES[:2])
    for each in said:
        np.testing.assert_allclose(each["mean"], per_row(at_two, BATCHES[2]).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (4, {"params": "sharded"}),
        (2, {"weight_update": "sharded"}),
        (1, {}),
    ],
)
def test_one_process_goes_on_from_what_two_have_saved(
    found: Any, number: int, options: dict[str, Any]
):
    step = step_of(number, **options)
    like = step.abstract_init(PARAMS)
    state, data = Checkpoints(found[0] / "run", step).restore_latest(like)
    assert (data, int(state.step)) == ({"at": 2}, 2)
    before, _ = on_one_device(loss_fn, optimizer(), PARAMS, BATCHES[:2])
    assert_close(state.params, before, 2e-6)
    state = train(step, state, BATCHES[2:])
    want, _ = on_one_device(loss_fn, optimizer(), PARAMS, BATCHES)
    assert_close(state.params, want, 2e-6)
