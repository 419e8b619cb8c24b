"""One folder has one writer, and a dead one's lock is taken over."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from crossshard import Checkpoints
from crossshard.checkpoints import folder as files
from crossshard.checkpoints.folder import WRITER, Lock
from crossshard.errors import CheckpointError
from tests.checkpoints.common import PARAMS, line_of, program, step_on, trained
from tests.quick import deep_but

HOLDER = """
import sys, pathlib
from crossshard.checkpoints.folder import Lock
held = Lock(pathlib.Path(sys.argv[1]))
print(held.take() or "taken", flush=True)
sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    running = program(HOLDER, folder)
    assert line_of(running) == "taken\n"
    return running


def test_a_second_process_is_told_who_writes_and_takes_over_when_that_one_is_dead(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)
    first = holder(tmp_path)
    checkpoints = Checkpoints(tmp_path, step)
    try:
        with pytest.raises(CheckpointError) as refused:
            checkpoints.save(state)
        told = str(refused.value)
        assert f"process {first.pid} on {socket.gethostname()}, which began at 20" in told
        assert "End it, or choose another folder." in told
        assert "\n" not in told
        assert checkpoints.restore_latest(state) is None
    finally:
        # A process that was killed, and that nobody has waited for, is dead, too.
        os.kill(first.pid, signal.SIGKILL)
        while Path(f"/proc/{first.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
    try:
        checkpoints.save(state)
        checkpoints.close()
    finally:
        first.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_two_in_one_process_and_the_process_ends(tmp_path: Path):
    """Two that wrote the same checkpoint left threads for which the interpreter waited at exit."""
    code = f"""
import crossshard, optax, numpy as np
crossshard.cpu_devices(1)
step = crossshard.make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
state = step.init(np.float32(3))
one, other = (crossshard.Checkpoints({str(tmp_path)!r}, step) for _ in range(2))
one.save(state)
try:
    other.save(state)
except crossshard.errors.CheckpointError as error:
    print(error)
one.wait()
print(one.steps(), crossshard.Checkpoints({str(tmp_path)!r}, step).restore_latest(state)[1])
"""
    running = program(code)
    printed, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    refusal, rest = printed.splitlines()
    assert "another Checkpoints of this process writes there. Close that one first" in refusal
    assert rest == "[0] None"
    assert [path.name for path in tmp_path.iterdir()] == ["00000000"]


def test_the_folder_is_free_once_nobody_refers_to_the_checkpoints(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)
    first = Checkpoints(tmp_path, step)
    first.save(state)
    first.wait()
    del first
    second = Checkpoints(tmp_path, step)
    second.restore_latest(state)
    second.save(state)
    second.close()
    assert second.steps() == [1, 2]


def test_what_another_run_has_written_meanwhile_is_neither_in_the_way_nor_written_over(
    tmp_path: Path,
):
    step = step_on(2)
    first = Checkpoints(tmp_path, step)
    first.save(trained(step, 1), "first")
    first.wait()
    second, third = Checkpoints(tmp_path, step), Checkpoints(tmp_path, step)
    state, _ = second.restore_latest(step.abstract_init(PARAMS))
    first.save(trained(step, 2), "first")
    first.close()
    third.restore_latest(state)
    says = r"Checkpoint 5 cannot be written .*has written checkpoint 2 .*restore_latest\(state\)"
    ahead = trained(step, 5)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=says) as refused:
            second.save(ahead)
        assert "is the last one" not in str(refused.value)
    # It does not hold the folder while it may not write.
    third.save(trained(step, 3), "third")
    third.close()
    state, data = second.restore_latest(state)
    assert (int(state.step), data) == (3, "third")
    second.save(ahead, "second")
    # What is brought in by hand while a run writes is not another run's.
    shutil.copytree(tmp_path / "00000002", tmp_path / "00000009")
    second.save(trained(step, 6))
    second.close()


def test_what_another_process_has_written_is_seen_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    elsewhere(tmp_path)
    lock, slept = Lock(tmp_path), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        # What an earlier writer has left is seen before.
        if len(slept) == 3:
            elsewhere(tmp_path, token="late")

    monkeypatch.setattr(time, "sleep", sleep)
    assert lock.sees("late")
    assert len(slept) == 3
    monkeypatch.setattr(files, "_LATE", 0.05)
    assert not lock.sees("never")


def elsewhere(folder: Path, **change: Any) -> None:
    """A lock of another machine."""
    body = {"process": 1, "began": 1, "host": "far", "machine": "far", "since": "long ago"}
    (folder / WRITER).write_text(json.dumps({**body, "token": "other", **change}))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BEAT", 0.1)
    monkeypatch.setattr(files, "_DEAD", 1.0)


# What is there in place of a writer's file, or is another machine's; nobody touches it.
PUTS: dict[str, Any] = {
    "another machine's": lambda path: elsewhere(path.parent),
    "nothing": lambda path: path.write_text(""),
    "a part": lambda path: path.write_text("["),
    "other types": lambda path: path.write_text('{"machine": 3, "process": "x"}'),
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to(path.parent.parent / "of another folder"),
    "deep": lambda path: path.write_text('{"token": ' + "[" * 100_000),
    "much": lambda path: path.write_text(json.dumps({"host": "far", "since": "x" * 100_000})),
}


@pytest.mark.parametrize("name", deep_but(["another machine's"], PUTS))
def test_what_nobody_touches_is_taken_over(name: str, quick: None, tmp_path: Path):
    folder, told = tmp_path / "run", []
    folder.mkdir()
    here = {"machine": files.machine(), "process": os.getpid(), "began": 0}
    (tmp_path / "of another folder").write_text(json.dumps(here))
    PUTS[name](folder / WRITER)
    own, began = Lock(folder), time.monotonic()
    taking = threading.Thread(target=lambda: told.append(own.take()), daemon=True)
    taking.start()
    taking.join(20)
    assert told == [""]
    assert time.monotonic() - began >= 1
    assert json.loads((folder / WRITER).read_text())["process"] == os.getpid()
    if name in ("deep", "much"):
        PUTS[name](folder / WRITER)
        assert own.take() == (
            "a process that has not said its name has taken the folder over, as this process did "
            "not respond"
        )
    else:
        own.release()
        assert list(folder.iterdir()) == []


def test_a_lock_of_another_machine_that_is_touched_is_respected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(files, "_BEAT", 0.1)
    first, second = Lock(tmp_path), Lock(tmp_path)
    assert first.take() == ""
    # As another machine sees it.
    monkeypatch.setattr(files, "machine", lambda: "another")
    told = second.take()
    assert f"process {os.getpid()} on {socket.gethostname()}" in told
    assert f"or delete {tmp_path / WRITER} if it has ended" in told
    first.release()
    assert second.take() == ""
    second.release()


def test_a_writer_that_was_taken_over_stops(quick: None, tmp_path: Path):
    step = step_on(2)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(step.init(PARAMS))
        checkpoints.wait()
        elsewhere(tmp_path)
        with pytest.raises(CheckpointError, match=r"process 1 on far, .* has taken"):
            checkpoints.save(step.init(PARAMS))
    assert json.loads((tmp_path / WRITER).read_text())["host"] == "far"


def test_of_many_that_find_a_dead_writer_one_takes_over(tmp_path: Path):
    elsewhere(tmp_path, machine=files.machine(), process=2**22 + 1)
    locks, told = [Lock(tmp_path) for _ in range(8)], []
    together = threading.Barrier(8)

    def take(own: Lock) -> None:
        together.wait()
        told.append(own.take())

    threads = [threading.Thread(target=take, args=(own,)) for own in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told.count("") == 1, told
    for own in locks:
        own.release()
    assert list(tmp_path.iterdir()) == []


def test_a_writers_words_do_not_command_a_terminal(tmp_path: Path):
    elsewhere(tmp_path, host="far\x1b[2J", since="then\u202e", process=["\x1b"] * 3)
    own = Lock(tmp_path)
    own._release = lambda: None
    told = own.take()
    assert "has taken the folder over" in told
    assert told.isprintable()
