"""A damaged checkpoint is refused with its leaf named, and the one before it is taken."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
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


def data_files(folder: Path) -> list[Path]:
    """The files with the arrays, the largest first."""
    files = [path for path in folder.glob("00000002/state/**/d/*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)


# One kind of damage each, and what the warning says.


def flip_a_hash(folder: Path) -> None:
    body = manifest_of(folder).read_text()
    manifest_of(folder).write_text(body.replace('"hash": "', '"hash": "f', 1))


def forge_a_hash(folder: Path) -> None:
    edit(manifest_of(folder), lambda body: body["leaves"][1].update(hash="0" * 16))


def forge_the_shards(folder: Path) -> None:
    edit(manifest_of(folder), lambda body: body.update(shards=1 << 40))


def truncate_all(folder: Path) -> None:
    for file in data_files(folder):
        os.truncate(file, file.stat().st_size // 2)


def link_outside(folder: Path) -> None:
    file = data_files(folder)[0]
    outside = folder.parent / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)


def link_a_checkpoint(folder: Path) -> None:
    shutil.move(folder / "00000002", folder.parent / "elsewhere")
    (folder / "00000002").symlink_to(folder.parent / "elsewhere")


def grow_the_manifest(folder: Path) -> None:
    os.truncate(manifest_of(folder), MOST_BYTES + 1)


def nest_the_manifest(folder: Path) -> None:
    manifest_of(folder).write_text("[" * 100_000)


def swap_manifests(folder: Path) -> None:
    shutil.copy(manifest_of(folder, 1), manifest_of(folder, 2))


def swap_arrays(folder: Path) -> None:
    shutil.rmtree(folder / "00000002" / "state")
    shutil.copytree(folder / "00000001" / "state", folder / "00000002" / "state")


def delete_arrays(folder: Path) -> None:
    for file in data_files(folder):
        file.unlink()


DAMAGES = {
    flip_a_hash: "checksum",
    forge_a_hash: r"\.params\['bias'\] has not the values that were written",
    forge_the_shards: "wrong type",
    truncate_all: r"description|\.step",
    link_outside: "a link or a device, which is not followed",
    link_a_checkpoint: "a link or a device, which is not followed",
    grow_the_manifest: "manifest.json has [0-9,]* bytes",
    nest_the_manifest: "manifest cannot be read",
    swap_manifests: "its manifest is that of checkpoint 1",
    swap_arrays: r"\.step has not the values that were written, as do \d+ more",
    delete_arrays: r"description|\.step|\.params",
    lambda folder: manifest_of(folder).unlink(): "no manifest",
    lambda folder: (folder / "00000002" / "commit_success.txt").unlink(): "was not committed",
    lambda folder: (folder / "00000002" / "state" / "_METADATA").unlink(): "description",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_the_one_before_is_taken(damage: Any, copy: Path, written: Any):
    damage(copy)
    with pytest.warns(CheckpointWarning, match=DAMAGES[damage]) as warned:
        state, data = restore(copy)
    assert "checkpoint 2:" in str(warned[0].message)
    assert "1 is taken" in str(warned[0].message)
    assert data == {"at": 1}
    check_same_bits(arrays(STEP(), state), written[1][1])


def test_a_changed_number_is_found_where_orbax_finds_nothing(copy: Path, written: Any):
    """The array is written again with other numbers: each file of it is in order."""
    import orbax.checkpoint as ocp

    handler, folder = ocp.PyTreeCheckpointHandler(), copy / "00000002" / "state"
    found = handler.restore(folder)
    place = next(key for key, x in found.items() if x.shape == PARAMS["odd"].shape)
    found[place] = np.array(found[place])
    found[place].view(np.uint32)[3, 5] ^= 1
    shutil.rmtree(folder)
    ocp.PyTreeCheckpointer().save(folder, found)
    with pytest.warns(CheckpointWarning, match=r"\.params\['odd'\] has not the values"):
        assert restore(copy)[1] == {"at": 1}


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
        (lambda body: body.update(version=2), "has version 2, and .* reads versions 3 and 4"),
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


def test_arrays_of_another_size_are_refused_before_they_are_read(copy: Path, monkeypatch: Any):
    import orbax.checkpoint as ocp

    folder = copy / "00000002" / "state"
    found = ocp.PyTreeCheckpointHandler().restore(folder)
    place = next(key for key, x in found.items() if x.shape == PARAMS["odd"].shape)
    found[place] = np.zeros((4000, 1000), np.float32)
    shutil.rmtree(folder)
    ocp.PyTreeCheckpointer().save(folder, found)
    monkeypatch.setattr(
        ocp.PyTreeCheckpointHandler, "restore", lambda *args, **kwargs: pytest.fail("it was read")
    )
    shutil.rmtree(copy / "00000001")
    with pytest.raises(CheckpointDamagedError, match=r"float32\[4000, 1000\] on disk"):
        restore(copy)


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


# A sweep.


def corrupt(folder: Path, rng: np.random.Generator) -> str:
    """Damage the latest checkpoint in a random way; returns what was done."""
    root = folder / "00000002"
    files = sorted(path for path in root.rglob("*") if path.is_file())
    # Most bytes are in few files, where most faults of a disk would be.
    sizes = np.array([path.stat().st_size for path in files], float)
    weights = sizes if rng.random() < 0.5 else np.ones(len(files))
    file = files[rng.choice(len(files), p=weights / weights.sum())]
    data = bytearray(file.read_bytes())
    at = int(rng.integers(max(1, len(data))))
    kind = rng.choice(["flip", "flips", "zeros", "noise", "truncate", "delete", "swap", "grow"])
    match kind:
        case "flip" | "flips":
            for place in [at] if kind == "flip" else rng.integers(len(data), size=64):
                data[place] ^= 1 << int(rng.integers(8))
        case "zeros" | "noise":
            length = min(512, len(data) - at)
            block = bytes(length) if kind == "zeros" else rng.bytes(length)
            data[at : at + length] = block
        case "truncate":
            del data[at:]
        case "grow":
            data += rng.bytes(100)
        case "swap":
            other = files[int(rng.integers(len(files)))]
            data = bytearray(other.read_bytes())
    if kind == "delete":
        file.unlink()
    else:
        file.write_bytes(data)
    return f"{kind} {file.relative_to(folder)} at {at}"


def sweep(times: int, written: Any, tmp_path: Path) -> dict[str, int]:
    """Corrupt a checkpoint until so many are found; every one that changes a value must be."""
    source, expected = written
    rng, counts = np.random.default_rng(0), {"found": 0, "harmless": 0}
    # Which files there are, and so which are hit, differs between runs.
    for number in range(10 * times):
        if counts["found"] == times:
            break
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        done = corrupt(folder, rng)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            state, data = restore(folder)
        found = [each for each in warned if issubclass(each.category, CheckpointWarning)]
        at = 1 if found else 2
        assert data == {"at": at}, done
        check_same_bits(arrays(STEP(), state), expected[at])
        counts["found" if found else "harmless"] += 1
        shutil.rmtree(folder)
    return counts


@pytest.mark.soak
def test_a_thousand_corruptions(
    written: Any, tmp_path: Path, soak_steps: int, capsys: pytest.CaptureFixture[str]
):
    times = max(1, soak_steps // 20)
    counts = sweep(times, written, tmp_path)
    with capsys.disabled():
        print(f"\nCorrupted checkpoints: {counts}")
    assert counts["found"] == times
