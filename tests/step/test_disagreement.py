"""Processes that give what must be the same, and is not: all are told, by the name of one."""

import dataclasses
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from crossshard import (
    CrossShardOptimizer,
    DynamicLossScale,
    Mean,
    _jax,
    make_train_step,
    shard,
)
from crossshard.distributed import agreement
from crossshard.errors import ArgumentError, CheckpointWarning, ProgramMismatchError
from tests.processes import DEVICES, PROCESSES, join, run_processes

pytestmark = pytest.mark.deep

SHARDS = PROCESSES * DEVICES
W = np.float32([1, 2, 3])


def loss_fn(w: Any, batch: Any) -> jax.Array:
    return (w * batch["x"]).mean()


def masked(w: Any, batch: Any) -> jax.Array:
    return ((w * batch["x"]).mean(-1) * batch["mask"]).sum() / batch["mask"].sum()


class Net(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ArgumentError, ProgramMismatchError) as error:
        return str(error)
    return "taken"


# The shapes of the batches that each process evaluates, and what all are told.
EVALUATED = {
    "none": ([], [(4, 3)], "batches: 0 and a further one of float32[4, 3], and process 0 0."),
    "more": (
        [(4, 3)] * 3,
        [(4, 3)] * 4,
        "batches: 3 and a further one of float32[4, 3], and process 0 3.",
    ),
    "known rows in another order": (
        [(8, 3), (4, 5), (8, 3)],
        [(8, 3), (4, 5), (4, 5)],
        "batches: 2 and a further one of float32[8, 5], and process 0 2 and a further one of "
        "float32[8, 3].",
    ),
}


def evaluate(step: Any, state: Any, batches: list[Any]) -> float:
    """The mean of the sums of the rows of all processes."""
    return float(step.evaluate(state, iter(batches), lambda w, x: x[:, :3] @ w))


def rows(number: int, value: float) -> dict[str, np.ndarray]:
    return {"x": np.full((number, 3), value, np.float32)}


def between_calls(process: int) -> dict[str, Any]:
    """What one process is told of what changes from call to call, and what it trains to."""
    found, own = {}, [20, 12][process]
    opt = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    plain = lambda w, x: jnp.mean((w - x) ** 2)
    counted = lambda w, x: Mean(((w - x) ** 2).sum(), x.size)
    # All rows of a step, of which each process has its own.
    x = np.linspace(0, 3, 32, dtype=np.float32)
    mine = x[:20] if process == 0 else x[20:]
    step = make_train_step(counted, opt, num_shards=SHARDS, accumulate_steps=2)
    found["counted"] = float(step(step.init(np.float32(0)), mine)[0].params)
    step = make_train_step(plain, opt, num_shards=SHARDS)
    state = step.init(np.float32(0))
    state, _ = step(state, x[:20])
    state, _ = step(state, x[:12])
    rates = state.opt_state.inner_state.hyperparams
    rates["learning_rate"] = rates["learning_rate"] * (1 + process)
    found["rate"] = refusal(lambda: step(state, x[:20]))
    other = dataclasses.replace(state, params=jnp.float32(process))
    found["replaced"] = refusal(lambda: step(other, x[:20]))
    rates["learning_rate"] = jnp.float32(0.5)
    found["same rate"] = refusal(lambda: step(state, x[:20]))
    w, opt = nnx.Param(jnp.float32(0)), CrossShardOptimizer(optax.sgd(0.5))
    run = shard(num_shards=SHARDS)(
        lambda w, opt, x: opt.minimize(lambda: plain(w[...], x), var_list=[w])
    )
    run(w, opt, x[:20])
    run(w, opt, x[:20])
    w[...] = jnp.float32(process)
    found["variable"] = refusal(lambda: run(w, opt, x[:20]))
    w[...] = jnp.float32(3)
    found["same variable"] = refusal(lambda: run(w, opt, x[:20]))
    # Both numbers of rows are known by now; the next comparison finds it.
    state = step.init(np.float32(0))
    state, _ = step(state, x[:own])
    found["known rows"] = refusal(lambda: step.init(np.float32(0)))
    return found


def closed_over(process: int, make: Callable[..., Any]) -> dict[str, Any]:
    """What one process is told of numbers that it has, and is not passed."""
    found, own = {}, 0.5 + process
    rate = lambda x: make(opt=optax.inject_hyperparams(optax.sgd)(learning_rate=x))
    found["rate of init"] = refusal(lambda: rate(own).init(W))
    found["same rate of init"] = refusal(lambda: rate(0.5).init(W))
    scaled = lambda x: make(loss_scale=DynamicLossScale(initial=x))
    found["scale of init"] = refusal(lambda: scaled(own).init(W))
    step = make()
    state = step.init(W)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        found["scale of reshard"] = refusal(lambda: scaled(own).reshard(state))
        found["same scale"] = refusal(lambda: scaled(0.5).reshard(state))
    batches = [np.ones((4, 3), np.float32)] * 2
    for call in ("evaluate", "predict"):
        run = lambda number, call=call: getattr(step, call)(
            state, batches, lambda w, x: x @ w - number
        )
        found[f"number of {call}"] = refusal(lambda run=run: run(own))
        found[f"same number of {call}"] = refusal(lambda run=run: run(0.5))
    return found


def main(process: int, port: int, out: str) -> None:
    """One process: what it is told of each thing that it gives otherwise than the other."""
    join(process, port)
    make = lambda loss=loss_fn, opt=None, **kwargs: make_train_step(
        loss, opt or optax.sgd(0.1), num_shards=SHARDS, **kwargs
    )
    step, found = make(), {}
    found["parameters"] = refusal(lambda: step.init(np.full(3, process, np.float32)))
    found["seed"] = refusal(lambda: step.init(W, process))
    found["dtype"] = refusal(lambda: step.init(W.astype(np.float16) if process else W))
    opt = optax.adam(0.1) if process else optax.sgd(0.1)
    found["optimizer"] = refusal(lambda: make(opt=opt).init(W))
    state = step.init(W.astype(np.float64) if process else jnp.asarray(W))
    # The check itself: what a process may not do with another one's call.
    other = step.init(W)
    found["call"] = refusal(lambda: step.init(W) if process else step(other, rows(4, 1.0)))
    whole = jax.device_get(step.unshard(state))
    moved = jax.tree.map(lambda x: x + process, whole)
    found["state"] = refusal(lambda: step.reshard(moved))
    found["same state"] = refusal(lambda: step.reshard(whole))
    # Rows of 0 in one process, and of 3 in the other.
    uneven = rows(8, 3.0) if process else rows(2, 0.0)
    found["rows"] = refusal(lambda: step(state, uneven))
    for name, kind in EVALUATED.items():
        batches = [np.ones(shape, np.float32) for shape in kind[process]]
        found[name] = refusal(lambda batches=batches: evaluate(step, other, batches))
    # As many batches, of which the last ones have other rows.
    batches = [np.ones((4, 3), np.float32)] * 20
    batches.append(np.full((1 + process, 3), 1 - process, np.float32))
    found["evaluated"] = evaluate(step, other, batches)
    # Of each comparison, only the next one is kept.
    assert len(_jax._coordinator().key_value_dir_get("crossshard/")) < 30
    state, metrics = step(state, rows(2, 3.0 * process))
    found["even rows"] = float(metrics["loss"])
    weighted = make(masked, weight="mask")
    given = uneven | {"mask": np.ones(len(uneven["x"]), np.float32)}
    _, metrics = weighted(weighted.init(np.ones(3, np.float32)), given)
    found["weighted rows"] = float(metrics["loss"])
    # The own part of the batch is lowered, as it is stepped.
    own = rows(2, 1.0)
    found["lowered"] = step.lower(state, own).in_avals[0][1]["x"].shape
    given = rows(3, 1.0) | {"mask": np.ones(3, np.float32)}
    state = weighted.init(W)
    found["lowered, padded"] = weighted.lower(state, given).in_avals[0][1]["x"].shape
    # What is whole in every shard must be the same in every process.
    times = lambda w, batch: loss_fn(w, batch) * batch["table"].sum()
    step = make(times, replicated_entries=["table"])
    table = {"table": np.full(3, process, np.float32)}
    found["table"] = refusal(lambda: step(step.init(W), rows(2, 1.0) | table))
    # Keys: a module's, and a batch's.
    dropped = make(lambda net, batch: (net.dropout(net.linear(batch["x"])) ** 2).mean())
    dropped(dropped.init(Net()), rows(2, 1.0))
    keyed = make(lambda w, batch: (w * jax.vmap(jax.random.normal)(batch["key"])[:, None]).mean())
    keys = jax.random.split(jax.random.key(process), 2)
    _, metrics = keyed(keyed.init(W), {"key": keys})
    found["keys"] = float(metrics["loss"])
    found |= closed_over(process, make)
    found |= between_calls(process)
    # One that does not come.
    agreement._UNWATCHED_SECONDS = 1
    if process:
        time.sleep(3)
    else:
        found["missing"] = refusal(lambda: step.init(W))
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process was told."""
    return run_processes("step.test_disagreement", tmp_path_factory.mktemp("processes"))


SAID = {
    "parameters": "To init, process 1 passed parameters checksum ",
    "dtype": "To init, process 1 passed ",
    "seed": "To init, process 1 passed rng checksum ",
    "optimizer": "To init, process 1 passed optimizer checksum ",
    "call": "Process 1 is at init, and process 0 at step.",
    "state": "To reshard, process 1 passed a state checksum ",
    "rows": "To step, process 1 passed batch['x'] float32[8, 3], and process 0 float32[2, 3].",
    "table": "To step, process 1 passed batch['table'] checksum ",
    "rate": "To step, process 1 passed state.opt_state.inner_state.hyperparams['learning_rate']",
    "replaced": "To step, process 1 passed state.params checksum ",
    "variable": "To step, process 1 passed Param float32[], variable 0 of the step, checksum ",
    **{
        f"{what} of {call}": f"The processes would not run the same {run}: process 1 differs. Its "
        for what, call, run in [
            ("rate", "init", "init"),
            ("scale", "init", "init"),
            ("scale", "reshard", "init"),
            ("number", "evaluate", "evaluate"),
            ("number", "predict", "predict"),
        ]
    },
    "known rows": "Before init, process 1 was given something else than process 0 in a step: ",
    **{name: f"To evaluate, process 1 passed {said}" for name, (_, _, said) in EVALUATED.items()},
}
ADVICE = {
    "none": "Pass as many batches in every process",
    "table": "pass the same entries of replicated_entries",
}


@pytest.mark.parametrize("what", SAID)
def test_every_process_is_told_which_one_gave_something_else(
    found: list[dict[str, Any]], what: str
):
    assert found[0][what] == found[1][what]
    assert found[0][what].startswith(SAID[what])
    assert ADVICE.get(what, "") in found[0][what]


def test_a_process_that_does_not_come_is_named(found: list[dict[str, Any]]):
    assert found[0]["missing"].startswith("Process 1 has not reached init in 1 seconds")


@pytest.mark.parametrize("process", range(PROCESSES))
def test_processes_that_agree_step(found: list[dict[str, Any]], process: int):
    told = found[process]
    assert {text for name, text in told.items() if name.startswith("same ")} == {"taken"}
    # A step of SGD with a rate of 1/2, from 0 on, ends at the mean of the rows of both.
    assert told["counted"] == pytest.approx(1.5)
    # The mean of w is 2; half of the rows are 0 and half 3, and with weights 2 of 10 are 0.
    assert told["even rows"] == pytest.approx(2 * 1.5)
    # W sums to 6. Of 163 rows, 161 are 1, and the last two of process 1 are 0.
    assert told["evaluated"] == pytest.approx(6 * 161 / 163)
    assert told["weighted rows"] == pytest.approx(2.4)


@pytest.mark.parametrize("process", range(PROCESSES))
def test_lower_takes_what_a_step_takes(found: list[dict[str, Any]], process: int):
    assert found[process]["lowered"] == [2 * PROCESSES, 3]
    assert found[process]["lowered, padded"] == [4 * PROCESSES, 3]


def test_keys_of_each_process(found: list[dict[str, Any]]):
    keys = [
        key for process in range(PROCESSES) for key in jax.random.split(jax.random.key(process))
    ]
    expected = 2 * np.mean([jax.random.normal(key) for key in keys])
    for told in found:
        assert told["keys"] == pytest.approx(expected, rel=1e-5)
