"""Kills at every point of a save, and damage to every file: the last good checkpoint comes back."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossshard import Checkpoints
from crossshard.checkpoints import folder as own
from crossshard.errors import CheckpointWarning
from tests.checkpoints.common import (
    PARAMS,
    XS,
    arrays,
    check_same_bits,
    line_of,
    program,
    step_on,
    trained,
    write,
)

# What Python is about to do with a file. TensorStore, which writes the arrays, does not say it.
CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.utime"}


class Watch:
    """Calls a function before each change of a file in a folder."""

    def __init__(self) -> None:
        self.folder, self.before = "", lambda event, path: None
        self._lock = threading.RLock()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: Any) -> None:
        if not self.folder or event not in CHANGES or not isinstance(args[0], str | os.PathLike):
            return
        path = os.fspath(args[0])
        writes = event != "open" or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and path.startswith(self.folder):
            with self._lock:
                self.before(event, path)


@pytest.fixture(scope="module")
def watch() -> Watch:
    """One for all tests, since nobody can take an audit hook away."""
    return Watch()


def state_of(folder: Path) -> tuple[list[np.ndarray], Any]:
    """What the newest run finds, without a word of damage."""
    step = step_on(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        found = Checkpoints(folder, step).restore_latest(step.abstract_init(PARAMS))
    assert found is not None
    return arrays(step, found[0]), found[1]


def goes_on(folder: Path) -> None:
    """A run saves after the kill, and nothing is left of what it interrupted."""
    with contextlib.suppress(OSError, ValueError):
        # Its process is dead.
        body = json.loads((folder / own.WRITER).read_text())
        (folder / own.WRITER).write_text(json.dumps({**body, "process": 2**22 + 1}))
    step = step_on(2)
    with Checkpoints(folder, step, keep=1) as checkpoints:
        state, _ = checkpoints.restore_latest(step.abstract_init(PARAMS))
        checkpoints.save(step(state, XS[4])[0], "after")
    assert state_of(folder)[1] == "after"
    assert len(list(folder.iterdir())) == 1


def copied(source: str, target: str) -> None:
    # Threads write on.
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, target)


def test_every_point_of_a_save(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of the folder before each change is what a kill would have left there."""
    monkeypatch.setattr(own, "_DEAD", 0.2)
    monkeypatch.setattr(own, "_BEAT", 0.1)
    run, step, points = tmp_path / "run", step_on(2), []
    state = trained(step, 1)
    expected = {"old": arrays(step, state)}

    def snapshot(event: str, path: str) -> None:
        if event == "os.utime":
            # The lock's thread touches its file at any time, also between a copy and its change.
            return
        points.append((event, Path(path).relative_to(run)))
        with contextlib.suppress(shutil.Error):
            shutil.copytree(run, tmp_path / str(len(points)), copy_function=copied)

    with Checkpoints(run, step, keep=1) as checkpoints:
        checkpoints.save(state, "old")
    with Checkpoints(run, step, keep=1) as checkpoints:
        checkpoints.restore_latest(state)
        state, _ = step(state, XS[1])
        expected["new"] = arrays(step, state)
        watch.folder, watch.before = str(run), snapshot
        checkpoints.save(state, "new")
        checkpoints.wait()
        checkpoints.close()
        watch.folder = ""
    number_of_events = len(points)
    renames = [str(path) for event, path in points if event == "os.rename"]
    # The commit, after all that is in it, and then that of the checkpoint that does not stay.
    *within, written, deleted = renames
    assert [path.split("/")[1][:5] for path in within] == ["state", "manif"], renames
    assert (written, deleted) == ("00000002.orbax-checkpoint-tmp", "00000001")
    commit = points.index(("os.rename", Path(written)))
    # Any part of the files of what was not committed: also those that TensorStore has written.
    (unfinished,) = (tmp_path / str(commit + 1)).glob("00000002.*")
    parts = sorted(path for path in unfinished.rglob("*") if path.is_file())
    assert len(parts) > 8
    for place, file in enumerate(parts):
        points.append(("half of", file.relative_to(unfinished)))
        part = shutil.copytree(tmp_path / str(commit + 1), tmp_path / str(len(points)))
        for late in parts[place:]:
            other = part / late.relative_to(tmp_path / str(commit + 1))
            if late is file:
                os.truncate(other, other.stat().st_size // 2)
            else:
                other.unlink()
    for number, point in enumerate(points, 1):
        found, data = state_of(tmp_path / str(number))
        assert data == ("new" if commit + 1 < number <= number_of_events else "old"), point
        check_same_bits(found, expected[data])
    # One of each kind that leaves something else.
    for number in {
        *range(1, len(points), len(points) // 8),
        commit + 1,
        commit + 2,
        number_of_events,
    }:
        goes_on(tmp_path / str(number))


# Of processes.

KILLED = """
import os, signal, sys, warnings
import crossshard
from pathlib import Path
from crossshard import Checkpoints
from tests.checkpoints.common import XS, step_on, trained
from tests.checkpoints.test_kills import Watch
warnings.simplefilter("error", crossshard.errors.CheckpointWarning)
folder, at = sys.argv[1], int(sys.argv[2])
watch, step = Watch(), step_on(2)
def kill(event, path):
    global at
    at -= 1
    if at == 0:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints = Checkpoints(folder, step, keep=2)
state = trained(step, 1)
state, saved = checkpoints.restore_latest(state) or (state, 0)
assert saved in (0, int(state.step))
print("from", int(state.step) if saved else 0, flush=True)
watch.before = kill
while True:
    state, _ = step(state, XS[1])
    checkpoints.save(state, int(state.step))
    watch.folder = folder
    checkpoints.wait()
    print("saved", int(state.step), flush=True)
"""


def kill_and_resume(points: list[int], folder: Path, within: Any = None) -> int:
    """Kill a program that saves all the time; returns how many left an unfinished checkpoint."""
    last = unfinished = 0
    for point in points:
        running = program(KILLED, folder, point)
        first = line_of(running).split()
        assert first[:1] == ["from"], first
        # Nothing that was acknowledged is lost.
        assert int(first[1]) >= last
        if within is not None:
            last = int(line_of(running).split()[1])
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(within())
            running.kill()
        for line in running.communicate()[0].splitlines():
            last = max(last, int(line.split()[1]))
        assert running.returncode == -signal.SIGKILL
        unfinished += any("tmp" in path.name for path in folder.iterdir())
    return unfinished


# A third into the first save, and at the commit and the deletion of the third.
@pytest.mark.parametrize(
    "points", [[15, 120], pytest.param(list(range(1, 60, 2)), marks=pytest.mark.deep)], ids=len
)
def test_a_process_that_is_killed_has_lost_nothing(points: list[int], tmp_path: Path):
    kill_and_resume(points, tmp_path)


@pytest.mark.soak
def test_fifty_kills(tmp_path: Path, soak_steps: int, capsys: pytest.CaptureFixture[str]):
    number, rng = max(1, soak_steps // 400), np.random.default_rng(1)
    unfinished = kill_and_resume([10**9] * number, tmp_path, lambda: float(rng.random()) * 0.2)
    with capsys.disabled():
        print(f"\n{number} kills, {unfinished} of them during a save: nothing acknowledged lost")
    assert unfinished > 5 or number < 50


# Damage.

DAMAGES = {
    "gone": lambda data: None,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "a bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "zeros": lambda data: bytes(len(data)),
    "grown": lambda data: data + b"\0more",
}


def test_damage_to_every_file_is_found_or_harmless(tmp_path: Path):
    expected, step = write(tmp_path / "run", 2), step_on(2)
    top = tmp_path / "run" / "00000002"
    files = [path for path in top.rglob("*") if path.is_file() and path.stat().st_size]
    found = set()
    for file in files:
        data = file.read_bytes()
        for name, damage in DAMAGES.items():
            after = damage(data)
            file.unlink() if after is None else file.write_bytes(after)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                state, at = Checkpoints(tmp_path / "run", step).restore_latest(
                    step.abstract_init(PARAMS)
                )
            is_found = any(issubclass(each.category, CheckpointWarning) for each in warned)
            # Which of the two it is must be said, and a wrong number is never silent.
            assert at == {"at": 1 if is_found else 2}, (file, name)
            check_same_bits(arrays(step, state), expected[at["at"]])
            found |= {(str(file.relative_to(top)), name)} if is_found else set()
            file.write_bytes(data)
    # What nothing is stored twice of.
    whole = {"manifest/manifest.json", "commit_success.txt"}
    assert found >= {(name, "gone") for name in whole}
    assert {name for path, name in found if path == "manifest/manifest.json"} == set(DAMAGES)
    largest = max(files, key=lambda path: path.stat().st_size)
    in_it = {name for path, name in found if path == str(largest.relative_to(top))}
    assert in_it >= {"gone", "empty", "half", "zeros"}
