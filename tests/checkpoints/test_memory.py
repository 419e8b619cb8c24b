"""Snapshots in memory: a process that starts again goes on from the newest that is whole."""

import functools
import json
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.checkpoints import memory
from crossshard.errors import (
    ArgumentError,
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointWarning,
)
from tests.checkpoints.common import (
    PARAMS,
    XS,
    arrays,
    check_same_bits,
    line_of,
    loss_fn,
    program,
    step_on,
    trained,
)
from tests.processes import join, run_processes
from tests.quick import deep


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Any]:
    return {"folder": tmp_path / "disk", "memory": tmp_path / "memory"}


def opened(folders: dict[str, Any], step: Any, **options: Any) -> Checkpoints:
    return Checkpoints(folders["folder"], step, memory=folders["memory"], **options)


def train(checkpoints: Checkpoints, step: Any, state: Any, steps: range) -> Any:
    for number in steps:
        state, _ = step(state, XS[number])
        checkpoints.snapshot(state, {"at": number + 1})
    checkpoints.wait()
    return state


def restored(folders: dict[str, Any], step: Any) -> tuple[Any, Any, str]:
    """What a process that starts again finds, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        checkpoints = opened(folders, step)
        state, data = checkpoints.restore_latest(step.abstract_init(PARAMS))
    return state, data, checkpoints.restored_from


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("update", ["replicated", "sharded", "parts"])
def test_the_newest_of_memory_and_disk_comes_back(
    folders: dict[str, Any], update: str, optimizer: str
):
    step = step_on(4, update, optimizer)
    checkpoints = opened(folders, step, memory_every=2)
    state = train(checkpoints, step, step.init(PARAMS), range(5))
    # One step of the five was not kept.
    four = trained(step, 4)
    found, data, source = restored(folders, step)
    check_same_bits(arrays(step, found), arrays(step, four))
    assert (data, source) == ({"at": 4}, f"Snapshot 4 in {folders['memory']}")
    # What is found is trained on, as without an interruption.
    again, _ = step(found, XS[4])
    check_same_bits(arrays(step, again), arrays(step, state))
    checkpoints.save(state, "disk")
    checkpoints.wait()
    found, data, source = restored(folders, step)
    check_same_bits(arrays(step, found), arrays(step, state))
    assert (data, source) == ("disk", f"Checkpoint 5 in {folders['folder']}")
    # On the disk is all that the memory has, so nothing stays there.
    checkpoints.close()
    assert list(folders["memory"].iterdir()) == []


@pytest.mark.parametrize("update", ["replicated", "sharded", "parts"])
def test_another_number_of_shards_reads_them(folders: dict[str, Any], update: str):
    eight, three = step_on(8, update), step_on(2, update)
    state = train(opened(folders, eight, memory_every=1), eight, eight.init(PARAMS), range(2))
    found, data, _ = restored(folders, three)
    check_same_bits(arrays(three, found), arrays(eight, state))
    assert data == {"at": 2}


def test_two_whole_ones_stay_and_a_number_is_never_used_twice(folders: dict[str, Any]):
    step = step_on(2)
    checkpoints = opened(folders, step, memory_every=1)
    train(checkpoints, step, step.init(PARAMS), range(5))
    names = lambda: sorted(path.name[:8] for path in folders["memory"].iterdir())
    # The third is deleted when all know of the fifth.
    assert names() == ["00000003", "00000004", "00000005"]
    again = opened(folders, step, memory_every=1)
    assert names() == ["00000004", "00000005"]
    state, _ = again.restore_latest(step.abstract_init(PARAMS))
    early = dict(zip(("step", "rng"), (state.step - 3, state.rng), strict=True))
    train(again, step, type(state)(**{**vars(state), **early}), range(1))
    assert names() == ["00000004", "00000005", "00000006"]
    assert restored(folders, step)[2] == f"Snapshot 6 in {folders['memory']}"


def test_arrays_of_all_kinds(folders: dict[str, Any]):
    params = {
        "half": jnp.ones((8, 4), jnp.bfloat16),
        "table": jnp.arange(6),
        "none": jnp.zeros((0, 3)),
        "scalar": jnp.float32(2),
    }

    def loss(params: Any, x: Any) -> jax.Array:
        return (x @ params["half"]).astype(jnp.float32).mean() * params["scalar"]

    optimizer = CrossShardOptimizer(
        optax.adam(0.1), group_assignment=[[0, 1], [2, 3]], ema=0.9, master_dtype="float32"
    )
    step = make_train_step(loss, optimizer, num_shards=4)
    state, _ = step(step.init(params), jnp.ones((8, 8), jnp.bfloat16))
    checkpoints = opened(folders, step, memory_every=1)
    checkpoints.snapshot(state)
    checkpoints.wait()
    found, data = opened(folders, step).restore_latest(step.abstract_init(params))
    assert data is None
    check_same_bits(arrays(step, found), arrays(step, state))


@pytest.mark.parametrize("update", ["replicated", "parts"])
def test_devices_that_are_no_cpus_copy_it_first(
    folders: dict[str, Any], update: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "_is_on_cpu", lambda x: False)
    step = step_on(4, update)
    with jax.set_mesh(step.mesh):
        state = train(opened(folders, step, memory_every=1), step, step.init(PARAMS), range(3))
    found, data, _ = restored(folders, step)
    check_same_bits(arrays(step, found), arrays(step, state))
    assert data == {"at": 3}


# Faults.


def killed(folders: dict[str, Any]) -> None:
    """A run of a process that kills itself after three steps, of which each has a snapshot."""
    code = (
        "import os, signal, sys\n"
        "import crossshard\n"
        "crossshard.cpu_devices(2)\n"
        "from tests.checkpoints.common import *\n"
        "from tests.checkpoints.test_memory import train\n"
        "step = step_on(2)\n"
        "checkpoints = Checkpoints(sys.argv[1], step, memory=sys.argv[2], memory_every=1)\n"
        "train(checkpoints, step, step.init(PARAMS), range(3))\n"
        "print('trained', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    running = program(code, folders["folder"], folders["memory"])
    assert line_of(running) == "trained\n"
    assert running.wait(60) == -signal.SIGKILL
    running.communicate()


def test_a_process_that_was_killed_goes_on(folders: dict[str, Any]):
    killed(folders)
    step = step_on(2)
    found, data, source = restored(folders, step)
    check_same_bits(arrays(step, found), arrays(step, trained(step, 3)))
    assert data == {"at": 3}
    assert source == f"Snapshot 3 in {folders['memory']}"


def write_two(folders: dict[str, Any]) -> Any:
    step = step_on(2)
    checkpoints = opened(folders, step, memory_every=1)
    train(checkpoints, step, step.init(PARAMS), range(2))
    return step


def test_a_snapshot_that_was_not_written_to_its_end_is_not_one(folders: dict[str, Any]):
    """What any kill leaves: a name without files, bytes without an index, an index half named."""
    step = write_two(folders)
    one, two = sorted(folders["memory"].iterdir())
    assert sorted(path.name for path in two.iterdir()) == ["0.bytes", "0.json"]
    index = (two / "0.json").rename(two / "0.unfinished")
    for unfinished in (index, two / "0.bytes"):
        assert restored(folders, step)[1] == {"at": 1}
        # Every start tidies up, so it is made again.
        assert sorted(folders["memory"].iterdir()) == [one]
        two.mkdir()
        (two / unfinished.name).write_text("")
    train(opened(folders, step, memory_every=1), step, step.init(PARAMS), range(0))


def test_damage_is_told_and_the_one_before_is_taken(folders: dict[str, Any]):
    step = write_two(folders)
    kept = shutil.copytree(folders["memory"], folders["memory"].parent / "kept")
    damages = {
        "has not the values": lambda file: flip(file / "0.bytes"),
        "has not the values ": lambda file: os.truncate(file / "0.bytes", 100),
        "parts cannot be read": lambda file: (file / "0.bytes").unlink(),
        "not all of": lambda file: change(file / "0.json", lambda body: body["parts"].pop()),
        "the manifest": lambda file: change(
            file / "0.json", lambda body: body["manifest"].update(number=7)
        ),
    }
    for what, damage in damages.items():
        shutil.rmtree(folders["memory"])
        shutil.copytree(kept, folders["memory"])
        damage(sorted(folders["memory"].iterdir())[-1])
        checkpoints = opened(folders, step)
        with pytest.warns(CheckpointWarning, match=f"Snapshot 2 in .*{what.strip()}.*passed over"):
            found, data = checkpoints.restore_latest(step.abstract_init(PARAMS))
        assert data == {"at": 1}
        check_same_bits(arrays(step, found), arrays(step, trained(step, 1)))


def test_a_snapshot_comes_before_an_older_checkpoint_if_a_newer_one_is_damaged(
    folders: dict[str, Any],
):
    step = step_on(2)
    checkpoints = opened(folders, step, memory_every=1)
    state = step.init(PARAMS)
    for number in range(1, 4):
        state, _ = step(state, XS[number - 1])
        checkpoints.snapshot(state, "memory") if number == 2 else checkpoints.save(state, "disk")
    checkpoints.wait()
    manifests = [folders["folder"] / f"0000000{number}/manifest/manifest.json" for number in (1, 3)]
    first = manifests[0].read_text()
    (snapshot,) = folders["memory"].iterdir()
    like = step.abstract_init(PARAMS)
    # The newer one alone, then both; what is restored stays until something is saved.
    for manifest in reversed(manifests):
        manifest.write_text("{}")
        with opened(folders, step) as again:
            with pytest.warns(CheckpointWarning, match=r"checkpoint 3: .*; snapshot 2 is taken"):
                found, data = again.restore_latest(like)
            assert (data, int(found.step)) == ("memory", 2)
            assert again.restored_from == f"Snapshot 2 in {folders['memory']}"
            check_same_bits(arrays(step, found), arrays(step, trained(step, 2)))
    flip(snapshot / "0.bytes")
    with (
        pytest.warns(CheckpointWarning, match="Snapshot 2 .* passed over"),
        pytest.raises(CheckpointDamagedError, match=r"checkpoint 3: .*; checkpoint 1: "),
    ):
        opened(folders, step).restore_latest(like)
    manifests[0].write_text(first)
    with (
        pytest.warns(CheckpointWarning, match="Snapshot 2 .* passed over"),
        pytest.warns(CheckpointWarning, match=r"checkpoint 3: .*; checkpoint 1 is taken"),
    ):
        assert opened(folders, step).restore_latest(like)[1] == "disk"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def change(file: Path, how: Any) -> None:
    from crossshard._hash import sha256

    body = json.loads(file.read_text())
    how(body)
    body["sha256"] = sha256({key: body[key] for key in ("here", "held", "all", "parts")})
    file.write_text(json.dumps(body))


def test_a_full_memory_is_a_warning_and_the_run_goes_on(folders: dict[str, Any]):
    step = step_on(2)
    with file_size_limit(20_000):
        checkpoints = opened(folders, step, memory_every=1)
        state, _ = step(step.init(PARAMS), XS[0])
        checkpoints.snapshot(state)
        with pytest.warns(CheckpointWarning, match="was not written .*File too large"):
            checkpoints.wait()
    assert [list(path.iterdir()) for path in folders["memory"].iterdir()] == [[]]
    checkpoints.snapshot(state, "second")
    checkpoints.wait()
    assert restored(folders, step)[1] == "second"


@contextmanager
def file_size_limit(number: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_snapshots_of_another_run_and_of_another_step_are_not_taken(folders: dict[str, Any]):
    step = write_two(folders)
    other = {**folders, "folder": folders["folder"].parent / "another"}
    assert opened(other, step).restore_latest(step.abstract_init(PARAMS)) is None
    assert list(folders["memory"].iterdir()) == []
    step = write_two(folders)
    adam = step_on(2, optimizer="adamw")
    with pytest.raises(CheckpointMismatchError, match=r"Snapshot 2 in .* is not of this step"):
        opened(folders, adam).restore_latest(adam.abstract_init(PARAMS))
    state = step.init(PARAMS)
    with pytest.raises(ArgumentError, match=r"restore_latest\(state\) before snapshot"):
        opened(folders, step, memory_every=1).snapshot(state)
    with pytest.raises(ArgumentError, match="have no folder in memory"):
        Checkpoints(folders["folder"], step).snapshot(state)


def test_a_folder_that_is_moved_keeps_its_run_and_a_copy_is_another_one(
    folders: dict[str, Any], tmp_path: Path
):
    step = step_on(2)
    checkpoints = opened(folders, step, memory_every=1)
    one = train(checkpoints, step, step.init(PARAMS), range(1))
    checkpoints.save(one, "disk")
    state = train(checkpoints, step, one, range(1, 3))
    kept = arrays(step, trained(step, 1)), arrays(step, state)
    moved = {**folders, "folder": folders["folder"].rename(tmp_path / "moved")}
    found, data, _ = restored(moved, step)
    check_same_bits(arrays(step, found), kept[1])
    assert data == {"at": 3}
    copied = {**folders, "folder": shutil.copytree(moved["folder"], tmp_path / "copied")}
    with pytest.warns(CheckpointWarning, match=r"copied is a copy of .*moved\. It is a run of its"):
        checkpoints = opened(copied, step)
    found, data = checkpoints.restore_latest(step.abstract_init(PARAMS))
    check_same_bits(arrays(step, found), kept[0])
    assert data == "disk"
    # It is told once.
    assert restored(copied, step)[1] == "disk"


def test_the_folder_is_private(folders: dict[str, Any], tmp_path: Path):
    step = write_two(folders)
    assert folders["memory"].stat().st_mode & 0o777 == 0o700
    folders["memory"].chmod(0o755)
    with pytest.raises(ArgumentError, match="chmod 700"):
        opened(folders, step)
    folders["memory"].chmod(0o700)
    (tmp_path / "link").symlink_to(folders["memory"])
    with pytest.raises(ArgumentError, match="not a folder of this user alone"):
        opened({**folders, "memory": tmp_path / "link"}, step)


# Several processes.


def two_axes() -> Any:
    """A step on two shards, each of two devices that have the same slices."""
    mesh = jax.make_mesh((2, 2), ("shards", "model"))
    return make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="shards", params="sharded")


def main(
    process: int,
    port: int,
    out: str,
    folder: str,
    processes: str,
    steps: str,
    hosts: str = "1",
    update: str = "parts",
    on_damage: Any = "error",
) -> None:
    join(process, port, int(processes), 4 // int(processes))
    step = two_axes() if update == "two axes" else step_on(4, update)
    # As many processes on each host, whose memory is a folder of its own.
    host = process * int(hosts) // int(processes)
    memory.machine = lambda: f"host {host}"
    own = f"{folder}/memory" if hosts == "1" else f"{folder}/memory-{host}"
    checkpoints = Checkpoints(
        f"{folder}/disk", step, memory=own, memory_every=1, memory_copies=1 + (hosts != "1")
    )
    with warnings.catch_warnings():
        # What is not whole is none, rather than damaged.
        warnings.simplefilter(on_damage, CheckpointWarning)
        found = checkpoints.restore_latest(step.abstract_init(PARAMS))
    state, data = found or (step.init(PARAMS), 0)
    first, last = data, int(steps)
    for number in range(first, last):
        state, _ = step(state, XS[number][step.own_rows(16)])
        checkpoints.snapshot(state, number + 1)
    checkpoints.wait()
    whole = step.unshard(state)
    content = [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(whole.params)]
    Path(out).write_text(json.dumps([first, checkpoints.restored_from, content]))
    # All end as if killed, which leaves the snapshots; but the first one not before the others.
    jax.distributed.shutdown()
    os._exit(0)


@pytest.mark.multiprocess
def test_processes_write_each_part_once_and_any_number_of_them_goes_on(tmp_path: Path):
    memory = tmp_path / "memory"
    two = run_processes("checkpoints.test_memory", tmp_path, tmp_path, 2, 3)
    assert [each[0] for each in two] == [0, 0]
    bytes_of = {
        path: sum(file.stat().st_size for file in path.glob("*.bytes")) for path in memory.iterdir()
    }
    assert len({*bytes_of.values()}) == 1
    of_state = sum(x.nbytes for x in jax.tree.leaves(trained(step_on(4, "parts"), 1)))
    assert {*bytes_of.values()} == {of_state}
    # The second process was killed while it wrote: its third snapshot is not whole.
    (third,) = memory.glob("00000003-*")
    (third / "1.json").unlink()
    four = run_processes("checkpoints.test_memory", tmp_path, tmp_path, 4, 4, processes=4)
    assert {(first, source) for first, source, _ in four} == {(2, f"Snapshot 2 in {memory}")}
    one = run_processes("checkpoints.test_memory", tmp_path, tmp_path, 1, 5, processes=1)
    assert one[0][:2] == [4, f"Snapshot 4 in {memory}"]
    expected = trained(step_on(4, "parts"), 5).params
    expected = [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(expected)]
    assert one[0][2] == expected


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "hosts", "update"),
    [(2, 2, "parts"), deep((4, 2, "parts")), deep((4, 4, "sharded"))],
)
def test_a_host_that_has_lost_its_memory_gets_its_parts_from_another(
    processes: int, hosts: int, update: str, tmp_path: Path
):
    def run(steps: int) -> list[Any]:
        words = tmp_path, tmp_path, processes, steps, hosts, update
        return run_processes("checkpoints.test_memory", *words, processes=processes)

    lost = [1] if hosts < 4 else [1, 3]
    run(2)
    of_state = sum(x.nbytes for x in jax.tree.leaves(trained(step_on(4, update), 1)))
    files = [*tmp_path.glob("memory-*/00000002-*/*.bytes")]
    # Two hosts have all of it, four have half of what is sharded.
    written = sum(file.stat().st_size for file in files)
    assert written == 2 * of_state or (hosts == 4 and written > 2 * of_state)
    for host in lost:
        shutil.rmtree(tmp_path / f"memory-{host}")
    # A checkpoint on disk would be found, had there been one.
    again = run(5)
    assert {first for first, *_ in again} == {2}
    assert again[1][1].startswith("Snapshot 2 in")
    expected = trained(step_on(4, update), 5).params
    expected = [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(expected)]
    assert all(content == expected for *_, content in again)
    if processes == 2:
        # What is damaged comes from the other host, too.
        flip(next(tmp_path.glob("memory-1/00000005-*/1.bytes")))
        assert {first for first, *_ in run(6)} == {5}
    else:
        # Neighbours that are both lost are too much, and the run begins anew.
        for host in (0, 1):
            shutil.rmtree(tmp_path / f"memory-{host}")
        assert {first for first, *_ in run(1)} == {0}


# What is done to the memory of two hosts, and after how many steps a run then goes on.
DAMAGES: dict[str, tuple[Any, int]] = {
    "bytes are gone": (lambda newest: (newest[1] / "1.bytes").unlink(), 2),
    "a host and the copies of its parts": (
        lambda newest: (shutil.rmtree(newest[1].parent), flip(newest[0] / "0.bytes")),
        1,
    ),
    "one of two manifests": (
        lambda newest: change(newest[1] / "1.json", lambda body: body["manifest"].update(number=7)),
        1,
    ),
}


@pytest.mark.multiprocess
@pytest.mark.deep
@pytest.mark.parametrize("name", DAMAGES)
def test_what_one_host_finds_damaged_keeps_none_waiting(name: str, tmp_path: Path):
    damage, expected = DAMAGES[name]
    run_processes("checkpoints.test_memory", tmp_path, tmp_path, 2, 2, 2)
    damage([next(tmp_path.glob(f"memory-{host}/00000002-*")) for host in range(2)])
    words = (2, 3, 2, "parts", "ignore")
    again = run_processes("checkpoints.test_memory", tmp_path, tmp_path, *words, patience=60)
    assert {first for first, *_ in again} == {expected}
    whole = [
        np.asarray(x).tobytes().hex()
        for x in jax.tree.leaves(trained(step_on(4, "parts"), 3).params)
    ]
    assert all(content == whole for *_, content in again)


@pytest.mark.multiprocess
@pytest.mark.deep
def test_a_host_that_has_what_the_next_one_writes_keeps_it_once(tmp_path: Path):
    run = functools.partial(run_processes, "checkpoints.test_memory", processes=4)
    (tmp_path / "whole").mkdir()
    whole = run(tmp_path / "whole", tmp_path / "whole", 4, 4, 4, "two axes")
    run(tmp_path, tmp_path, 4, 2, 4, "two axes")
    for file in tmp_path.glob("memory-*/*/*.json"):
        parts = [str(part[:2]) for part in json.loads(file.read_text())["parts"]]
        assert len({*parts}) == len(parts)
    shutil.rmtree(tmp_path / "memory-2")
    again = run(tmp_path, tmp_path, 4, 4, 4, "two axes")
    assert {(first, *words) for first, _, words in again} == {(2, *whole[0][2])}
    assert all(source.startswith("Snapshot 2 in") for _, source, _ in again)


def test_what_is_kept_after_an_older_one_was_restored_is_the_newest(folders: dict[str, Any]):
    step = step_on(2)
    checkpoints = opened(folders, step, memory_every=1)
    state = step.init(PARAMS)
    for number in range(4):
        state, _ = step(state, XS[number])
        checkpoints.save(state, number)
        checkpoints.snapshot(state, number)
    checkpoints.wait()
    state, _ = checkpoints.restore(state, 2)
    state, _ = step(state, XS[5])
    checkpoints.snapshot(state, "kept")
    checkpoints.wait()
    found, data, source = restored(folders, step)
    assert (data, source) == ("kept", f"Snapshot 5 in {folders['memory']}")
    check_same_bits(arrays(step, found), arrays(step, state))
    state, _ = step(state, XS[4])
    checkpoints.save(state, "saved")
    checkpoints.wait()
    assert restored(folders, step)[1] == "saved"


def test_what_is_saved_after_as_many_steps_as_an_abandoned_snapshot_is_the_newest(
    folders: dict[str, Any],
):
    step = step_on(2)
    checkpoints = opened(folders, step, memory_every=2)
    state, _ = step(step.init(PARAMS), XS[0])
    checkpoints.save(state, "before")
    checkpoints.snapshot(state)
    state, _ = step(state, XS[1])
    checkpoints.snapshot(state, "abandoned")
    state, _ = checkpoints.restore(state, 1)
    state, _ = step(state, XS[2])
    checkpoints.snapshot(state)
    checkpoints.save(state, "saved")
    checkpoints.wait()
    found, data, _ = restored(folders, step)
    assert data == "saved"
    check_same_bits(arrays(step, found), arrays(step, state))
