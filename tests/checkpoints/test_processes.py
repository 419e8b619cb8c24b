"""Several processes save and restore one state together."""

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import crossshard
from crossshard import Checkpoints
from tests.checkpoints.common import PARAMS, XS, arrays, check_same_bits, step_on, trained
from tests.processes import join, run_processes

pytestmark = pytest.mark.multiprocess


def main(process: int, port: int, out: str, folder: str) -> None:
    """One process: save, restore, pass over what is damaged, and write down what came of it."""
    join(process, port)
    step, said = step_on(4), {}
    rows = slice(process * 8, (process + 1) * 8)
    state = step.init(PARAMS)
    with Checkpoints(folder, step, keep=2) as checkpoints:
        for number, x in enumerate(XS[:3]):
            state, _ = step(state, x[rows])
            checkpoints.save(state, {"at": number})
        try:
            checkpoints.save(state, {"at": process})
        except crossshard.errors.ArgumentError as error:
            said["data"] = str(error)
    whole = [np.asarray(x) for x in jax.tree.leaves(step.unshard(state))]
    # Process 1 alone sees this link; both must take the checkpoint before.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        checkpoints = Checkpoints(folder, step)
        own = checkpoints._folder.check

        def check(number: int) -> None:
            from crossshard.checkpoints.folder import Damaged

            own(number)
            if process == 1 and number == 3:
                raise Damaged("only this process sees it")

        checkpoints._folder.check = check
        found, data = checkpoints.restore_latest(step.abstract_init(PARAMS))
    said |= {"warned": [str(each.message) for each in warned], "data_of_2": data}
    said["step"] = int(found.step)
    found, data = Checkpoints(folder, step).restore_latest(step.abstract_init(PARAMS))
    again = [np.asarray(x) for x in jax.tree.leaves(step.unshard(found))]
    said["same"] = all(a.tobytes() == b.tobytes() for a, b in zip(whole, again, strict=True))
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
        said |= {"stopped": [number, int(state.step), checkpoints.steps()[-1]]}
    Path(out).write_text(json.dumps(said))
    if process == 0:
        np.savez(Path(out).with_suffix(".npz"), *whole)
    jax.distributed.shutdown()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    base = tmp_path_factory.mktemp("processes")
    return base, run_processes("checkpoints.test_processes", base, base / "run")


def test_it_comes_back_with_the_same_bits_in_every_process(found: Any):
    assert all(each["same"] for each in found[1])


def test_one_process_restores_what_two_have_written(found: Any):
    base, _ = found
    with np.load(base / "0.npz") as written:
        expected = [written[name] for name in written.files]
    for shards in (1, 8):
        step = step_on(shards)
        state, data = Checkpoints(base / "run", step).restore_latest(step.abstract_init(PARAMS))
        assert data == {"at": 2}
        check_same_bits(arrays(step, state), expected)
    # And it is what one process computes.
    for a, b in zip(expected, arrays(step_on(1), trained(step_on(1), 3)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_all_processes_pass_over_what_one_cannot_read(found: Any):
    for each in found[1]:
        assert (each["step"], each["data_of_2"]) == (2, {"at": 1})
        (warning,) = each["warned"]
        assert "only this process sees it" in warning


def test_data_that_differs_between_processes_is_refused_in_all(found: Any):
    for each in found[1]:
        assert "To save, process 1 passed data checksum " in each["data"]


def test_all_processes_save_and_stop_at_one_step_when_one_is_asked_to(found: Any):
    first, second = (each["stopped"] for each in found[1])
    assert first == second
    number, steps, saved = first
    assert 3 <= number < 399
    assert steps == saved == number + 1
