"""Verification in a job of two processes: of steps that are right, and of one that is not."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.errors import ArgumentError
from crossshard.tools.verification.verify import Fault
from tests.processes import join, run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.deep]

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
PARAMS = {"w": np.full(3, 0.5, np.float32), "v": np.float32(0.1)}


def mean(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["v"] - 1) ** 2)


def summed(params: Any, x: Any) -> Any:
    return len(x) * mean(params, x)


def wide(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w).sum(1) - 1) ** 2)


def main(process: int, port: int, out: str) -> None:
    """One process of the job."""
    join(process, port)
    told = {}
    for name, loss, options in [
        ("rows last", lambda params, x: mean(params, x.T), {"batch_axis": 1}),
        ("replicated", mean, {"weight_update": "replicated"}),
        ("sharded", mean, {"weight_update": "sharded", "ema": 0.9, "check_divergence": 2}),
        ("groups", mean, {"groups": [[0, 2], [1, 3]]}),
        ("sum", lambda params, x: summed(params, x) / len(X), {"reduction": "sum"}),
        ("summed", summed, {"loss_over": "shard"}),
    ]:
        wrapped = {k: options.pop(k) for k in ("groups", "reduction") if k in options}
        if "groups" in wrapped:
            wrapped["group_assignment"] = wrapped.pop("groups")
        optimizer = crossshard.CrossShardOptimizer(optax.adam(1e-3), **wrapped)
        step = crossshard.make_train_step(loss, optimizer, **options)
        rows = X.T if "batch_axis" in options else X
        told[name] = str(crossshard.verify(step, PARAMS, rows))
    step = crossshard.make_train_step(mean, optax.sgd(0.1))
    half = X[8 * process :][:8]
    scaled = crossshard.make_train_step(
        lambda p, b: b["scale"] * mean(p, b["x"]), optax.sgd(0.1), replicated_entries=("scale",)
    )
    for name, given in [
        ("rows", (step, PARAMS, X[:10])),
        ("make_step", (main, X)),
        ("own rows", (step, PARAMS, half)),
        ("a number", (scaled, PARAMS, {"x": X, "scale": 1.0 + process})),
    ]:
        try:
            crossshard.verify(*given)
        except ArgumentError as error:
            told[name] = str(error)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w = jax.device_put(np.full((3, 4), 0.5, np.float32), NamedSharding(mesh, P(None, "model")))
    step = crossshard.make_train_step(wide, optax.adam(0.1), mesh=mesh, axis_name="data")
    told["model axes"] = str(crossshard.verify(step, w, X))
    if process:
        see_a_fault()
    told["of one process"] = str(crossshard.verify(step, w, X))
    Path(out).write_text(json.dumps(told))
    jax.distributed.shutdown()


def see_a_fault() -> None:
    # Only a device that computes wrongly would show one to a single process.
    module = sys.modules["crossshard.tools.verification.verify"]
    own = Fault("update", "w: another update", ("w",), 2.0, shards=(1,))
    conclude = module._conclude
    module._conclude = lambda *seen: dataclasses.replace(conclude(*seen), faults=(own,))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_processes("tools.verification.test_processes", tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("name", ["replicated", "sharded", "groups", "sum", "rows last"])
def test_a_right_step_is_fine(told, name):
    fine = "fine: on 4 shards and 16 rows, all 2 parameters take the step of one device\n"
    proven = f"note: in its rows the loss is a {'sum' if name == 'sum' else 'mean'} over the rows"
    assert [each[name] for each in told] == [fine + proven] * 2


def test_a_model_that_is_split_over_devices_is_fine(told):
    fine = "fine: on 2 shards and 16 rows, the parameter takes the step of one device\n"
    assert all(each["model axes"].startswith(fine) for each in told)


def test_a_loss_that_is_a_sum_is_found_in_both(told):
    first, second = (each["summed"] for each in told)
    assert first == second
    assert first.startswith("wrong on 4 shards and 16 rows:\n  all 2 parameters: 0.250 = 1/N")


def test_both_tell_what_one_has_found(told):
    wrong = "wrong on 2 shards and 16 rows:\n  w: another update (found in process 1)"
    assert [each["of one process"].split("\nnote")[0] for each in told] == [wrong, wrong]


def test_what_cannot_be_compared_is_refused(told):
    for each in told:
        assert "10 rows do not divide over 4 shards" in each["rows"]
        assert "In a job of 2 processes, verify takes a TrainStep" in each["make_step"]
        assert "To verify, process 1 passed batch checksum" in each["own rows"]
        assert "Pass all rows in every process" in each["own rows"]
        assert "To verify, process 1 passed batch checksum" in each["a number"]
