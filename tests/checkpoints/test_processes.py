"""Several processes save and restore one state together, and train sharded parameters."""

import dataclasses
import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from crossshard import Checkpoints, make_train_step
from crossshard.checkpoints import folder as files
from crossshard.checkpoints.folder import Damaged, Lock
from crossshard.errors import ArgumentError, CheckpointError
from tests.checkpoints.common import PARAMS, XS, arrays, check_same_bits, step_on, trained
from tests.processes import join, run_processes
from tests.step.common import assert_close, on_one_device, train

pytestmark = pytest.mark.multiprocess

RNG = np.random.default_rng(0)
# Between processes on CPUs a matrix must be large to be gathered by itself.
LARGE = {
    "large": np.float32(RNG.normal(size=(1024, 1024)) / 32),
    "few": np.float32(RNG.normal(size=(64, 32)) / 8),
    "bias": np.zeros(3, np.float32),
}
BATCHES = np.float32(RNG.normal(size=(4, 16, 1024)))


def loss_fn(params: Any, x: Any) -> jax.Array:
    of_others = ((params["few"] - 1) ** 2).mean() + (params["bias"] - 1).sum() ** 2
    return ((jax.numpy.tanh(x @ params["large"]) - 1) ** 2).mean() + of_others


def per_row(params: Any, x: Any) -> Any:
    return (jax.numpy.tanh(x @ params["large"]) ** 2).mean(1)


def step_of(number: int, **options: Any) -> Any:
    return make_train_step(loss_fn, optax.sgd(0.1, 0.9), num_shards=number, ema=0.9, **options)


def refusal(call: Any) -> str:
    with pytest.raises((ArgumentError, CheckpointError)) as refused:
        call()
    return str(refused.value)


def main(process: int, port: int, out: str, folder: str) -> None:
    """One process: save, restore, pass over what is damaged, and write down what came of it."""
    join(process, port)
    rows = slice(process * 8, (process + 1) * 8)
    state, said = whole(process, rows, folder)
    said |= unlike(process, folder)
    sharded_state, of_sharded = sharded(process, rows, f"{folder}-sharded")
    Path(out).write_text(json.dumps(said | of_sharded))
    if process == 0:
        np.savez(Path(out).with_suffix(".npz"), *state, **sharded_state)
    jax.distributed.shutdown()


def whole(process: int, rows: slice, folder: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    step, said = step_on(4), {}
    state = step.init(PARAMS)
    with Checkpoints(folder, step, keep=2) as checkpoints:
        for number, x in enumerate(XS[:3]):
            state, _ = step(state, x[rows])
            checkpoints.save(state, {"at": number})
        said["data"] = refusal(lambda: checkpoints.save(state, {"at": process}))
    said |= others(process, step, state, folder)
    found = [np.asarray(x) for x in jax.tree.leaves(step.unshard(state))]
    # Process 1 alone sees this damage; both must take the checkpoint before.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        checkpoints = Checkpoints(folder, step)
        own = checkpoints._folder.check

        def check(number: int) -> None:
            own(number)
            if process == 1 and number == 3:
                raise Damaged("only this process sees it")

        checkpoints._folder.check = check
        before, data = checkpoints.restore_latest(step.abstract_init(PARAMS))
    said["before"] = [str(each.message) for each in warned], data, int(before.step)
    again, _ = Checkpoints(folder, step).restore_latest(step.abstract_init(PARAMS))
    pairs = zip(found, jax.tree.leaves(step.unshard(again)), strict=True)
    said["same"] = all(a.tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    with Checkpoints(f"{folder}-stopped", step) as checkpoints:
        state = step.init(PARAMS)
        for number in range(400):
            state, _ = step(state, XS[0][rows])
            # One process is asked to stop, and the two are not at the same place.
            if (process, number) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01 * (1 + process))
            if checkpoints.save_if_preempted(state, {"stopped": number}):
                break
        said["stopped"] = [number, int(state.step), checkpoints.steps()[-1]]
    return found, said


def unlike(process: int, folder: str) -> dict[str, Any]:
    """What processes are told that pass other options, or have folders of their own."""
    step, said = step_on(4), {}
    state = step.init(PARAMS)

    def opened(where: str = f"{folder}-unlike", memory: Any = None, **options: Any) -> Checkpoints:
        return Checkpoints(where, step, memory=memory, **options)

    own = f"{folder}-memory-{process}"
    said["memory"] = refusal(lambda: opened(memory=None if process else own))
    said["every"] = refusal(lambda: opened(memory=own, memory_every=2 + process))
    said["copies"] = refusal(lambda: opened(memory=own, memory_copies=1 + process))
    # As a process that makes one checkpoint more than the other.
    shared = opened()
    said["calls"] = refusal(opened if process else shared.steps)
    late, files._LATE = files._LATE, 0.2
    apart = opened(f"{folder}-apart-{process}")
    # Written to its end, or a process that expects a refusal would not end.
    said["apart"] = [refusal(lambda: (apart.save(state), apart.close())) for _ in range(2)]
    said["left"] = [str(path) for path in Path(f"{folder}-apart-{process}").rglob("*")]
    files._LATE = late
    seen, looks = Lock.sees, list[str]()

    def sees(lock: Lock, token: str) -> bool:
        looks.append(token)
        return seen(lock, token)

    Lock.sees = sees
    with opened(memory=f"{folder}-memory", memory_every=1) as checkpoints:
        checkpoints.save(state, "disk")
        checkpoints.snapshot(state, "memory")
        checkpoints.save(dataclasses.replace(state, step=state.step + 1), "damaged")
        checkpoints.wait()
        said["looks"] = len(looks)
        check = checkpoints._folder.check
        checkpoints._folder.check = lambda number: (check(number), damaged(process, number))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _, data = checkpoints.restore_latest(state)
        said["snapshot"] = data, [str(each.message) for each in warned]
    Lock.sees = seen
    return said


def damaged(process: int, number: int) -> None:
    if (process, number) == (1, 1):
        raise Damaged("only this process sees it")


def others(process: int, step: Any, state: Any, folder: str) -> dict[str, Any]:
    """What one process is told where each reads another checkpoint, or snapshots other data."""
    said, (one, two) = {}, Checkpoints(folder, step).steps()
    number = two if process else one
    for call in ("restore", "restore_params"):
        run = getattr(Checkpoints(folder, step), call)
        said[call] = refusal(lambda run=run: run(state, number))
    with Checkpoints(f"{folder}-0", step, memory=f"{folder}-others", memory_every=1) as checkpoints:
        said["of snapshot"] = refusal(lambda: checkpoints.snapshot(state, {"at": process}))
        checkpoints.snapshot(state, {"at": 3})
        checkpoints.snapshot(state, {"at": 3})
        checkpoints.wait()
        checkpoints.snapshot(state, {"at": 3})
        assert checkpoints._snapshots is not None
        assert len(checkpoints._snapshots._whole) == 2
    return said


def sharded(process: int, rows: slice, folder: str) -> tuple[Any, dict[str, Any]]:
    step = step_of(4, params="sharded")
    state = step.init(LARGE)
    pieces = [x.data.shape for x in state.params["large"].addressable_shards]
    # Made by all processes together, each its slice: no one has all of it.
    sharding = jax.tree.map(lambda x: x.sharding, state.params)
    made = jax.jit(lambda: jax.tree.map(jax.numpy.asarray, LARGE), out_shardings=sharding)()
    state = step.init(made)
    said: dict[str, Any] = {
        "pieces": pieces,
        "again": step.replay(state, BATCHES[0][rows]) == {},
    }
    state = train(step, state, [x[rows] for x in BATCHES[:2]])
    said["mean"] = float(step.evaluate(state, [BATCHES[2][rows]], per_row))
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.save(state, {"at": 2})
    state = train(step, state, [x[rows] for x in BATCHES[2:]])
    # What one process would do with other parameters.
    bad = {**LARGE, "bias": np.full(3, process, np.float32)}
    said["refused"] = refusal(lambda: step.init(bad))
    return step.unshard(state).params, said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    base = tmp_path_factory.mktemp("processes")
    return base, run_processes("checkpoints.test_processes", base, base / "run")


def test_one_process_restores_what_two_have_written(found: Any):
    base, said = found
    assert all(each["same"] for each in said)
    with np.load(base / "0.npz") as written:
        expected = [written[name] for name in written.files if name.startswith("arr_")]
    for shards in (1, 8):
        step = step_on(shards)
        state, data = Checkpoints(base / "run", step).restore_latest(step.abstract_init(PARAMS))
        assert data == {"at": 2}
        check_same_bits(arrays(step, state), expected)
    # And it is what one process computes.
    for a, b in zip(expected, arrays(step_on(1), trained(step_on(1), 3)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_processes_pass_over_and_refuse_and_stop_together(found: Any):
    _, said = found
    assert said[0]["stopped"] == said[1]["stopped"]
    number, steps, saved = said[0]["stopped"]
    assert 3 <= number < 399
    assert steps == saved == number + 1
    for each in said:
        (warning,), data, step = each["before"]
        assert "only this process sees it" in warning
        assert (data, step) == ({"at": 1}, 2)
        assert "To save, process 1 passed data checksum " in each["data"]
        assert "process 1 passed" in each["refused"]
        assert "To snapshot, process 1 passed data checksum " in each["of snapshot"]
        for call in ("restore", "restore_params"):
            assert "To restore, process 1 passed checkpoint 3 of hash " in each[call]


def test_unlike_options_and_folders_are_refused_and_a_snapshot_is_taken_by_all(found: Any):
    base, said = found
    # Once, and the one that writes not at all.
    assert [each["looks"] for each in said] == [0, 1]
    for each in said:
        at = "To Checkpoints, process 1 passed "
        assert f"{at}memory None, and process 0 a folder" in each["memory"]
        assert f"{at}memory_every 3, and process 0 2" in each["every"]
        assert f"{at}memory_copies 2, and process 0 1" in each["copies"]
        assert "Process 1 is at Checkpoints, and process 0 at steps" in each["calls"]
        for told in each["apart"]:
            says = "process 1 does not see what process 0 has written in "
            assert f"{says}{base}/run-apart-0. Give all processes one folder" in told
        assert each["left"] == []
        data, (warning,) = each["snapshot"]
        assert data == "memory"
        assert "checkpoint 1: only this process sees it. It is damaged" in warning
        assert "snapshot 0 is taken" in warning


def test_sharded_parameters_of_two_processes_follow_one_device(found: Any):
    base, said = found
    own = loss_fn, optax.sgd(0.1, 0.9), LARGE
    at_two, at_four = (on_one_device(*own, BATCHES[:number])[0] for number in (2, 4))
    with np.load(base / "0.npz") as got:
        assert_close({name: got[name] for name in LARGE}, at_four, 2e-6)
    for each in said:
        assert (each["pieces"], each["again"]) == ([[256, 1024]] * 2, True)
        np.testing.assert_allclose(each["mean"], per_row(at_two, BATCHES[2]).mean(), rtol=1e-5)
    # One process goes on from what they have saved.
    for number, options in ((4, {"params": "sharded"}), (2, {"weight_update": "sharded"}), (1, {})):
        step = step_of(number, **options)
        like = step.abstract_init(LARGE)
        state, data = Checkpoints(base / "run-sharded", step).restore_latest(like)
        assert (data, int(state.step)) == ({"at": 2}, 2)
        assert_close(state.params, at_two, 2e-6)
        assert_close(train(step, state, BATCHES[2:]).params, at_four, 2e-6)
