"""Which checkpoint is restored and which ones stay; weights alone; remote folders; moved ones."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from crossshard import Checkpoints
from crossshard.errors import (
    ArgumentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWarning,
)
from tests.checkpoints.common import PARAMS, XS, arrays, check_same_bits, step_on, trained, write
from tests.quick import deep


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[Any]]]:
    """A folder with checkpoints 1 to 3, and the arrays of each."""
    folder = tmp_path_factory.mktemp("run")
    return folder, write(folder, 3)


@pytest.fixture
def copy(written: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written[0], tmp_path / "run"))


def test_any_checkpoint_can_be_restored_and_a_run_that_goes_back_saves_after_them(
    copy: Path, written: Any
):
    step = step_on(2)
    with Checkpoints(copy, step) as checkpoints:
        state = step.abstract_init(PARAMS)
        assert checkpoints.steps() == [1, 2, 3]
        for number in (3, 2, 1):
            found, data = checkpoints.restore(state, number)
            assert data == {"at": number}
            check_same_bits(arrays(step, found), written[1][number])
        with pytest.raises(ArgumentError, match=r"has no checkpoint 7; it has 1, 2, 3\."):
            checkpoints.restore(state, np.int64(7))
        (copy / "00000002" / "manifest" / "manifest.json").write_text("{}")
        says = r"2 in .* is not whole: checkpoint 2: the manifest"
        with pytest.raises(CheckpointDamagedError, match=says):
            checkpoints.restore(state, 2)
        checkpoints.save(step(found, XS[3])[0], "branch")
    # The damaged one is not one of the three to keep.
    assert checkpoints.steps() == [1, 2, 3, 4]
    assert Checkpoints(copy, step).restore_latest(state)[1] == "branch"


@pytest.fixture(scope="module")
def states() -> list[Any]:
    """States of eight steps, which are not donated again."""
    state = step_on(2).init(PARAMS)
    return [dataclasses.replace(state, step=state.step + number) for number in range(8)]


def test_the_best_the_newest_and_the_pinned_stay(states: list[Any], tmp_path: Path):
    scores = [0.5, 3.0, -1.0, 2.0, float("nan"), 1.0, None, 0.0]
    step = step_on(2)
    for half in (slice(0, 5), slice(5, 8)):
        # The scores are on disk: a run that goes on knows them.
        with Checkpoints(tmp_path, step, keep=2, keep_best=2) as checkpoints:
            checkpoints.restore_latest(states[0])
            for number, score in list(enumerate(scores))[half]:
                checkpoints.save(states[number], score=score, pin=number == 2)
                if number == 1:
                    checkpoints.wait()
                    (tmp_path / "00000000" / "manifest" / "pinned").touch()
    assert checkpoints.steps() == [0, 1, 2, 3, 6, 7]


def test_checkpoints_that_were_moved_away_do_not_end_the_run(states: list[Any], tmp_path: Path):
    run, away = tmp_path / "run", tmp_path / "away"
    with Checkpoints(run, step_on(2), keep=1) as checkpoints:
        checkpoints.save(states[0])
        checkpoints.wait()
        (run / "00000000").rename(away)
        for state in states[1:3]:
            checkpoints.save(state)
    assert checkpoints.steps() == [2]
    assert away.is_dir()


# Weights alone.


@pytest.mark.parametrize("update", ["replicated", "sharded", "parts"])
def test_another_optimizer_takes_the_parameters(update: str, written: Any):
    folder, expected = written
    step = step_on(4, update, "adamw")
    state = step.init({key: np.zeros_like(x) for key, x in PARAMS.items()})
    moments = jax.tree.map(np.asarray, state.opt_state)
    with pytest.raises(CheckpointMismatchError):
        Checkpoints(folder, step).restore_latest(state)
    found = Checkpoints(folder, step).restore_params(state)
    for number, after in ((1, Checkpoints(folder, step).restore_params(state, 1)), (3, found)):
        own = [np.asarray(x) for x in jax.tree.leaves(after.params)]
        place = 1  # After the step.
        check_same_bits(own, expected[number][place : place + len(own)])
    for x, like in zip(*map(jax.tree.leaves, (found.params, state.params)), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    for x, was in zip(*map(jax.tree.leaves, (found.opt_state, moments)), strict=True):
        np.testing.assert_array_equal(x, was)
    after, _ = step(found, XS[0])
    assert int(after.step) == 1


def test_weights_that_are_not_there(copy: Path):
    step = step_on(2)
    small = {**PARAMS, "bias": np.zeros(4, np.float32)}
    with pytest.raises(
        CheckpointMismatchError, match=r"\['bias'\] has the shape \(3,\) .* \(4,\) here"
    ):
        Checkpoints(copy, step).restore_params(step.init(small))
    swapped = copy / "00000003" / "state"
    shutil.rmtree(swapped)
    shutil.copytree(copy / "00000002" / "state", swapped)
    with pytest.warns(CheckpointWarning, match=r"\.params.* has not the values"):
        found = Checkpoints(copy, step).restore_params(step.init(PARAMS))
    like = Checkpoints(copy, step).restore_params(step.init(PARAMS), 2)
    check_same_bits(*([np.asarray(x) for x in jax.tree.leaves(s.params)] for s in (found, like)))


# Remote folders, as far as they can be had here.


@pytest.mark.deep
def test_a_remote_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Orbax's libraries for paths and for arrays reach a bucket, which is a folder here."""
    from etils.epath import backend, gpath
    from orbax.checkpoint._src.path import gcs_utils

    here = lambda path: str(path).replace("gs://bucket", str(tmp_path))

    class Bucket:
        def __getattr__(self, name: str) -> Any:
            own = getattr(backend.os_backend, name)
            return lambda path, *args, **kwargs: own(here(path), *map(moved, args), **kwargs)

    moved = lambda x: here(x) if str(x).startswith("gs://") else x
    # A file of its own, or a folder of arrays.
    end = lambda path: "" if str(path).rstrip("/").endswith("_sharding") else "/"
    store = lambda path: {"driver": "file", "path": here(path).rstrip("/") + end(path)}
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Bucket())
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", store)

    step = step_on(2)
    states = [trained(step, steps) for steps in (1, 2, 3)]
    with Checkpoints("gs://bucket/run", step, keep=2) as checkpoints:
        for state in states:
            checkpoints.save(state, int(state.step), score=1.0)
            other = Checkpoints("gs://bucket/run", step)
            other.restore_latest(state)
            with pytest.raises(CheckpointError, match="another Checkpoints of this process"):
                other.save(state)
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["00000002", "00000003"]
    # What a killed process leaves in a bucket has its name already, and no marker.
    (folder / "00000003" / "commit_success.txt").unlink()
    with Checkpoints("gs://bucket/run", step) as checkpoints:
        found, data = checkpoints.restore_latest(step.abstract_init(PARAMS))
        assert data == 2
        check_same_bits(arrays(step, found), arrays(step, states[1]))
        checkpoints.save(states[2], 3)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.restore(step.abstract_init(PARAMS), 3)[1] == 3


# Beside a run that writes.


@pytest.mark.parametrize("pinned", [False, deep(True)])
def test_what_is_deleted_while_it_is_read_is_not_damaged(
    pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    step = step_on(2)
    state = trained(step, 1)
    reader = Checkpoints(tmp_path, step)
    check, began = reader._folder.check, []
    with Checkpoints(tmp_path, step, keep=1) as writer:
        writer.save(state, "old", pin=pinned)
        writer.save(step(trained(step, 1), XS[1])[0], "first")
        writer.wait()

        def vanish(number: int) -> int:
            for path in tmp_path.glob("0*"):
                shutil.rmtree(path)
            return number

        def late(number: int) -> None:
            began.append(number)
            if len(began) <= times:
                writer.save(trained(step, 1), len(began))
                writer.wait()
            check(number)

        monkeypatch.setattr(reader._folder, "check", late)
        times = 2
        # The newest, and no word of those that are gone, nor the older one that is pinned.
        assert reader.restore_latest(state)[1] == 2
        assert began == [2, 3, 4]
        began, times = [], 100
        with pytest.raises(CheckpointError, match=r"Each checkpoint in .*, 21 so far, .* keep=10"):
            reader.restore_latest(state)
        # None at all is left of what there was, which is not the same as none.
        began, times = [], 0
        monkeypatch.setattr(reader._folder, "check", lambda number: check(vanish(number)))
        with pytest.raises(CheckpointError, match="deleted while it was read"):
            reader.restore_latest(state)
