"""Full disks, and folders that are read-only or gone: the last good checkpoint stays."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from crossshard import Checkpoints
from crossshard.errors import CheckpointError
from tests.checkpoints.common import PARAMS, arrays, check_same_bits, program, step_on, trained

FULL = """
import os, sys, resource
import crossshard
crossshard.cpu_devices(2)
import numpy as np, optax
folder = sys.argv[1]
normal = np.random.default_rng(0).normal
params = {str(k): np.float32(normal(size=(256, 256))) for k in range(4)}
loss = lambda p, x: sum((w ** 2).mean() for w in p.values()) * x.mean()
step = crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=2)
state = step.init(params)
with crossshard.Checkpoints(folder, step) as checkpoints:
    checkpoints.save(state, "good")
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    for _ in range(2):
        checkpoints.save(state, "bad")
        try:
            checkpoints.wait()
        except crossshard.errors.CheckpointError as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    print(sorted(set(os.listdir(folder)) - {"writer.json"}))
    _, data = crossshard.Checkpoints(folder, step).restore_latest(state)
    checkpoints.save(state, data + " again")
print(crossshard.Checkpoints(folder, step).restore_latest(state)[1])
"""


def test_a_full_disk_is_one_clear_error_and_the_last_good_one_stays(tmp_path: Path):
    # A limit on the size of a file fails a write as a full disk does, with another number.
    running = program(FULL, tmp_path)
    printed, told = running.communicate(timeout=280)
    assert running.returncode == 0, told[-3000:]
    *errors, left, data = printed.splitlines()
    assert len(errors) == 2, printed
    for error in errors:
        assert error.startswith(f"Checkpoint 1 was not written to {tmp_path}: "), error
        assert error.endswith(
            ": File too large. Checkpoint 0 is the last one that was, and is as it was."
        )
    assert (left, data) == ("['00000000']", "good again")


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that another user could reach, since root may write anywhere."""
    folder = Path(tempfile.mkdtemp(prefix="crossshard-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_read_only_folder_can_be_read_and_not_written(reachable: Path):
    step = step_on(2)
    state = trained(step, 1)
    with Checkpoints(reachable, step) as checkpoints:
        checkpoints.save(state)
    # Once as this user: the other one may not be able to read what is imported at first use.
    checkpoints = Checkpoints(reachable, step)
    checkpoints.restore_latest(step.abstract_init(PARAMS))
    reachable.chmod(0o555)
    was = os.geteuid()
    try:
        if was == 0:
            os.seteuid(65534)
        found, _ = checkpoints.restore_latest(step.abstract_init(PARAMS))
        with pytest.raises(CheckpointError, match=r"the folder is read-only\. Checkpoint 1 is"):
            checkpoints.save(found)
        with pytest.raises(CheckpointError, match="cannot be used as a folder"):
            Checkpoints(reachable / "new", step)
        # Nor can a file, whoever asks.
        with pytest.raises(CheckpointError, match="cannot be used as a folder of checkpoints"):
            Checkpoints(__file__, step)
    finally:
        os.seteuid(was)
        reachable.chmod(0o755)
    check_same_bits(arrays(step, found), arrays(step, state))


@pytest.mark.parametrize("when", ["before", "during"])
def test_the_folder_vanishes(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = step_on(2)
    state = trained(step, 1)
    folder, moved = tmp_path / "run", tmp_path / "moved"
    checkpoints = Checkpoints(folder, step)
    checkpoints.save(state, "good")
    checkpoints.wait()
    if when == "before":
        folder.rename(moved)
        with pytest.raises(CheckpointError, match="the folder is gone"):
            checkpoints.save(state)
    else:
        rename = os.rename

        def vanish(source: Any, target: Any, **kwargs: Any) -> None:
            if str(target) == str(folder / "00000002"):
                rename(folder, moved)
            rename(source, target, **kwargs)

        # The commit is a rename; just before it the folder goes.
        monkeypatch.setattr(os, "rename", vanish)
        monkeypatch.setattr(Path, "rename", lambda self, target: vanish(self, target))
        checkpoints.save(state)
        with pytest.raises(CheckpointError, match=r"Checkpoint 2 was not written .* is gone"):
            checkpoints.wait()
        monkeypatch.undo()
    assert not folder.exists()
    checkpoints.close()
    assert Checkpoints(moved, step).restore_latest(state)[1] == "good"


def test_an_error_in_the_loop_is_not_hidden_by_one_of_the_checkpoint(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)

    def loop() -> None:
        with Checkpoints(tmp_path, step) as checkpoints:
            checkpoints.save(state)
            checkpoints._saving._orbax.wait_until_finished = full  # type: ignore[union-attr,method-assign]
            raise ZeroDivisionError

    def full() -> None:
        raise OSError("No space left on device")

    with pytest.raises(ZeroDivisionError) as caught:
        loop()
    assert "the disk is full" in caught.value.__notes__[0]


def test_what_a_kill_has_left_is_deleted(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)
    for name in ("00000007.orbax-checkpoint-tmp", "00000003.deleted"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "123").mkdir()
    with Checkpoints(tmp_path, step) as checkpoints:
        assert checkpoints.restore_latest(state) is None
        checkpoints.save(state)
    assert {path.name for path in tmp_path.iterdir()} == {"00000001", "123", "notes.txt"}
    assert jax.process_count() == 1
