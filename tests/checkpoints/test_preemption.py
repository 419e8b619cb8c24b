"""SIGTERM ends a loop of one line after a step, with a checkpoint of it."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from crossshard import Checkpoints
from crossshard.errors import CheckpointError
from tests.checkpoints.common import XS, arrays, check_same_bits, line_of, program, step_on, trained

LOOP = """
import os, signal, sys, time
import crossshard, optax, numpy as np
crossshard.cpu_devices(1)
step = crossshard.make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
with crossshard.Checkpoints(sys.argv[1], step) as checkpoints:
    state = step.init(np.float32(3))
    state, data = checkpoints.restore_latest(state) or (state, 0)
    print("from", data, flush=True)
    for batch in range(data, 10_000):
        state, _ = step(state, np.ones(2, np.float32))
        if checkpoints.save_if_preempted(state, batch + 1):
            break
        print("step", flush=True)
        time.sleep(0.01)
print("left", batch + 1, int(state.step), flush=True)
"""


def test_a_run_that_is_asked_to_stop_goes_on_where_it_was(tmp_path: Path):
    taken = 0
    for _ in range(2):
        running = program(LOOP, tmp_path)
        assert line_of(running) == f"from {taken}\n"
        assert line_of(running) == "step\n"
        running.terminate()
        printed, errors = running.communicate(timeout=60)
        assert running.returncode == 0, errors
        _, batch, steps = printed.splitlines()[-1].split()
        assert batch == steps
        assert int(batch) > taken
        taken = int(batch)
    assert max(int(path.name) for path in tmp_path.iterdir()) == taken


def stop(checkpoints: Checkpoints, state: Any) -> bool:
    os.kill(os.getpid(), signal.SIGTERM)
    return checkpoints.save_if_preempted(state, "stopped")


def test_the_state_is_on_disk_and_the_signal_is_given_back(tmp_path: Path):
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    step = step_on(2)
    state = trained(step, 1)
    try:
        own = signal.getsignal(signal.SIGTERM)
        with Checkpoints(tmp_path, step) as checkpoints:
            assert not checkpoints.save_if_preempted(state)
            assert checkpoints.steps() == []
            # Who had the signal before still hears of it.
            assert stop(checkpoints, state)
            assert came == [signal.SIGTERM]
            assert checkpoints.steps() == [1]
            # Once is enough.
            assert checkpoints.save_if_preempted(state)
            assert checkpoints.steps() == [1]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    expected = arrays(step, state)
    found, data = Checkpoints(tmp_path, step).restore_latest(state)
    assert data == "stopped"
    check_same_bits(arrays(step, found), expected)


def test_what_was_just_saved_is_not_saved_again(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save_if_preempted(state)
        checkpoints.save(state, "saved")
        assert stop(checkpoints, state)
        state, _ = step(state, XS[1])
        assert checkpoints.save_if_preempted(state, "later")
    assert checkpoints.steps() == [1, 2]


def test_a_state_after_an_older_one_was_restored_is_saved(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save_if_preempted(state)
        checkpoints.save(state, "before")
        state, _ = step(state, XS[1])
        checkpoints.save(state, "abandoned")
        state, _ = checkpoints.restore(state, 1)
        state, _ = step(state, XS[2])
        assert stop(checkpoints, state)
    expected = arrays(step, state)
    found, data = Checkpoints(tmp_path, step).restore_latest(state)
    assert data == "stopped"
    check_same_bits(arrays(step, found), expected)


def test_a_second_signal_ends_the_process(tmp_path: Path):
    code = LOOP.replace("time.sleep(0.01)", "os.kill(os.getpid(), 15); os.kill(os.getpid(), 15)")
    running = program(code, tmp_path)
    running.communicate(timeout=60)
    assert running.returncode == -signal.SIGTERM


def test_another_thread_gets_no_signals(tmp_path: Path):
    step, refused = step_on(2), []
    state = trained(step, 1)
    checkpoints = Checkpoints(tmp_path, step)

    def call() -> None:
        try:
            checkpoints.save_if_preempted(state)
        except CheckpointError as error:
            refused.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert "main thread" in refused[0]
