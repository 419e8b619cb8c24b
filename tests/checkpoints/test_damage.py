"""A damaged checkpoint is refused with its leaf named, and the one before it is taken."""

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from crossshard import Checkpoints
from crossshard.checkpoints.folder import MOST_BYTES, Damaged
from crossshard.checkpoints.manifest import read_manifest
from crossshard.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointWarning
from tests.checkpoints.common import PARAMS, arrays, check_same_bits, edit, step_on, write

STEP = lambda: step_on(2)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[Any]]]:
    """A folder with checkpoints 1 to 2, and the arrays of each."""
    folder = tmp_path_factory.mktemp("run")
    return folder, write(folder, 2)


@pytest.fixture
def copy(written: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written[0], tmp_path / "run"))


def restore(folder: Path) -> Any:
    step = STEP()
    return Checkpoints(folder, step).restore_latest(step.abstract_init(PARAMS))


def manifest_of(folder: Path, number: int = 2) -> Path:
    return folder / f"{number:08d}" / "manifest" / "manifest.json"


# One kind of damage each, and what the warning says; what is missing or cut off is in test_kills.


def link_outside(folder: Path) -> None:
    file = max(folder.glob("00000002/state/**/d/*"), key=lambda path: path.stat().st_size)
    shutil.move(file, folder.parent / "outside")
    file.symlink_to(folder.parent / "outside")


def link_a_checkpoint(folder: Path) -> None:
    shutil.move(folder / "00000002", folder.parent / "elsewhere")
    (folder / "00000002").symlink_to(folder.parent / "elsewhere")


def swap_arrays(folder: Path) -> None:
    shutil.rmtree(folder / "00000002" / "state")
    shutil.copytree(folder / "00000001" / "state", folder / "00000002" / "state")


def change_a_number(folder: Path) -> None:
    """The array is written again with other numbers: each file of it is in order."""
    found = ocp.PyTreeCheckpointHandler().restore(folder / "00000002" / "state")
    place = next(key for key, x in found.items() if x.shape == PARAMS["odd"].shape)
    found[place] = np.array(found[place])
    found[place].view(np.uint32)[3, 5] ^= 1
    write_again(folder, found)


def write_again(folder: Path, arrays: Any) -> None:
    shutil.rmtree(folder / "00000002" / "state")
    ocp.PyTreeCheckpointer().save(folder / "00000002" / "state", arrays)


NOT_FOLLOWED = "a link or a device, which is not followed"
forge = lambda **change: lambda folder: edit(manifest_of(folder), lambda body: body.update(change))
DAMAGES: dict[str, tuple[Any, str]] = {
    "a hash is flipped": (
        lambda folder: manifest_of(folder).write_text(
            manifest_of(folder).read_text().replace('"hash": "', '"hash": "f', 1)
        ),
        "checksum",
    ),
    "a hash is forged": (
        lambda folder: edit(manifest_of(folder), lambda it: it["leaves"][1].update(hash="0" * 16)),
        r"\.params\['bias'\] has not the values that were written",
    ),
    "shards are forged": (forge(shards=1 << 40), "wrong type"),
    "a file is a link": (link_outside, NOT_FOLLOWED),
    "it is a link": (link_a_checkpoint, NOT_FOLLOWED),
    "a large manifest": (
        lambda folder: os.truncate(manifest_of(folder), MOST_BYTES + 1),
        "manifest.json has [0-9,]* bytes",
    ),
    "a deep manifest": (
        lambda folder: manifest_of(folder).write_text("[" * 100_000),
        "manifest cannot be read",
    ),
    "another manifest": (
        lambda folder: shutil.copy(manifest_of(folder, 1), manifest_of(folder)),
        "its manifest is that of checkpoint 1",
    ),
    "no manifest": (lambda folder: manifest_of(folder).unlink(), "no manifest"),
    "other arrays": (swap_arrays, r"\.step has not the values that were written, as do \d+ more"),
    "another number": (change_a_number, r"\.params\['odd'\] has not the values"),
    "no marker": (
        lambda folder: (folder / "00000002" / "commit_success.txt").unlink(),
        "was not committed",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_one_before_is_taken(name: str, copy: Path, written: Any):
    damage, says = DAMAGES[name]
    damage(copy)
    with pytest.warns(CheckpointWarning, match=says) as warned:
        state, data = restore(copy)
    assert re.search("checkpoint 2: .* 1 is taken", str(warned[0].message))
    assert data == {"at": 1}
    check_same_bits(arrays(STEP(), state), written[1][1])


def test_none_is_whole(copy: Path):
    for number in (1, 2):
        manifest_of(copy, number).write_text("{}")
    with pytest.raises(CheckpointDamagedError, match=r"checkpoint 2: .*; checkpoint 1: "):
        restore(copy)


def test_a_run_goes_on_after_a_damaged_one(copy: Path):
    manifest_of(copy).write_text("{}")
    step = STEP()
    with Checkpoints(copy, step, keep=1) as checkpoints:
        with pytest.warns(CheckpointWarning):
            state, _ = checkpoints.restore_latest(step.abstract_init(PARAMS))
        checkpoints.save(state, "on")
    assert [path.name for path in copy.iterdir()] == ["00000003"]
    assert restore(copy)[1] == "on"


# What is whole, but not ours.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(version=2), "has version 2, and .* reads versions 3 to 6"),
        (lambda body: body.update(extra=1), "an unknown key 'extra'"),
        (lambda body: body.pop("rng"), "no key 'rng'"),
        (lambda body: body["leaves"].pop(), "it has no "),
        (lambda body: body.update(rng="rbg"), "random key is of rbg, and here of threefry"),
    ],
)
def test_another_format_is_refused_and_not_passed_over(change: Any, message: str, copy: Path):
    edit(manifest_of(copy), change)
    with pytest.raises(CheckpointMismatchError, match=message):
        restore(copy)


def test_words_on_disk_do_not_command_a_terminal(copy: Path):
    def shout(body: Any) -> None:
        body["fingerprint"]["options"].update(reduction="\x1b[2JSUM", accumulate_steps="\x1b[1m")

    edit(manifest_of(copy), shout)
    with pytest.raises(CheckpointMismatchError, match="SUM in it") as refused:
        restore(copy)
    assert str(refused.value).isprintable()
    step = STEP()
    with pytest.warns(CheckpointWarning, match="accumulate_steps") as warned:
        Checkpoints(copy, step).restore_latest(step.abstract_init(PARAMS), strict=False)
    assert str(warned[0].message).isprintable()
    (copy / "00000002" / "state" / "\x1b[2J").symlink_to("x")
    with pytest.warns(CheckpointWarning, match="a link or a device") as warned:
        restore(copy)
    assert str(warned[0].message).isprintable()


def test_arrays_of_other_types_are_refused(copy: Path):
    found = ocp.PyTreeCheckpointHandler().restore(copy / "00000002" / "state")
    place = next(key for key, x in found.items() if x.shape == PARAMS["odd"].shape)
    write_again(copy, found | {place: np.zeros((4000, 1000), np.float32)})
    shutil.rmtree(copy / "00000001")
    with pytest.raises(CheckpointDamagedError, match=r"Requested shape: \(37, 29\) is not"):
        restore(copy)
    # Of another dtype, and as what is no array.
    write_again(copy, found | {place: np.int32(found[place])})
    with pytest.raises(CheckpointDamagedError, match=r"'odd'\] is int32 on disk, and float32 in"):
        restore(copy)
    write_again(copy, found)
    metadata = copy / "00000002" / "state" / "_METADATA"
    for kind in ("None", "np.ndarray", "scalar", "string"):
        text = re.sub('"value_type": *"[^"]*"', f'"value_type": "{kind}"', metadata.read_text())
        metadata.write_text(text)
        with contextlib.suppress(CheckpointDamagedError):
            assert restore(copy)[1] == {"at": 2}


WRONG = {
    "below zero": lambda body: body.update(step=-1),
    "a bool for a number": lambda body: body.update(step=True),
    "a number for a text": lambda body: body.update(rng=3),
    "a text for a list": lambda body: body.update(groups="0 1"),
    "a text in a list of numbers": lambda body: body.update(groups=[[0], ["1"]]),
    "a key too few": lambda body: body["leaves"][0].pop("hash"),
    "a key too many": lambda body: body["fingerprint"].update(more=1),
    "a fraction in a shape": lambda body: body["leaves"][0].update(shape=[1.0]),
    "a number for an option": lambda body: body["fingerprint"]["options"].update(ema=0.9),
    "nothing for an update": lambda body: body["fingerprint"]["updates"].update(optimizer=None),
    "a path twice": lambda body: body["leaves"].append(body["leaves"][0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_of_a_wrong_type_are_damage(name: str, copy: Path):
    edit(manifest_of(copy), WRONG[name])
    with pytest.raises(Damaged, match="values of a wrong type"):
        read_manifest(manifest_of(copy), 2)
