"""Data in checkpoints: JSON, or iterators, one in each process; and the best checkpoint."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from crossshard import Checkpoints
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWarning,
)
from tests.checkpoints.common import PARAMS, arrays, check_same_bits, edit, step_on, trained
from tests.processes import join, run_processes
from tests.quick import deep_but
from tests.step.common import sgd_step

PROCESSES = 2
ROWS = np.float32(np.random.default_rng(0).normal(size=(512, 64)))


class Drawn:
    """Batches of random rows; its state is that of numpy's generator, and one dict for all time."""

    def __init__(self, seed: int = 0, rows: int = 16):
        self._rng, self._rows, self._live = np.random.default_rng(seed), rows, dict[str, Any]()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        found = ROWS[self._rng.integers(len(ROWS), size=self._rows)]
        self.get_state()
        return found

    def get_state(self) -> Any:
        self._live.update(self._rng.bit_generator.state)
        return self._live

    def set_state(self, state: Any) -> None:
        self._rng.bit_generator.state = state


class Bytes(Drawn):
    """The same with bytes as state, not all of which are text."""

    def get_state(self) -> Any:
        return b"\xff\0" + json.dumps(super().get_state()).encode()

    def set_state(self, state: Any) -> None:
        assert state[:2] == b"\xff\0"
        super().set_state(json.loads(state[2:]))


def grain_rows(process: int = 0, processes: int = 1) -> Any:
    """Shuffled rows from Grain, two epochs, of which each process takes its part."""
    grain = pytest.importorskip("grain")
    rows = grain.MapDataset.source(ROWS[:48]).shuffle(seed=1).repeat(2)
    return iter(rows[process::processes].batch(16 // processes).to_iter_dataset())


def grain_loader() -> Any:
    """The same from Grain's DataLoader, whose state is bytes."""
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(48, grain.sharding.NoSharding(), True, 2, seed=1)
    batches = [grain.transforms.Batch(16)]
    return iter(grain.DataLoader(data_source=ROWS[:48], sampler=sampler, operations=batches))


KINDS: dict[str, Callable[[], Any]] = {
    "JSON": Drawn,
    "bytes": Bytes,
    "grain": grain_rows,
    "grain loader": grain_loader,
}


@pytest.mark.parametrize("where", deep_but(["folder"], ["folder", "memory"]))
@pytest.mark.parametrize("ahead", deep_but([2], [0, 1, 2, 5]))
@pytest.mark.parametrize("kind", deep_but(["JSON", "grain"], KINDS))
def test_it_goes_on_at_the_next_batch(kind: str, ahead: int, where: str, tmp_path: Path):
    step, saved = step_on(2), {}
    made = lambda: step.prefetch(KINDS[kind](), ahead) if ahead else KINDS[kind]()
    folders = {"folder": tmp_path / "run", "memory": tmp_path / "memory"}
    checkpoints, state, batches = Checkpoints(step=step, **folders, memory_every=1), None, made()
    state = step.init(PARAMS)
    for number, batch in enumerate(itertools.islice(batches, 5), 1):
        state, _ = step(state, batch)
        if number == 3:
            put = checkpoints.save if where == "folder" else checkpoints.snapshot
            put(state, batches)
            saved = batches.get_state()
    checkpoints.wait()
    again, batches = Checkpoints(step=step, **folders), made()
    found, data = again.restore_latest(step.abstract_init(PARAMS))
    assert again.restored_from.startswith("Snapshot 3" if where == "memory" else "Checkpoint 3")
    assert type(data) is type(saved)
    batches.set_state(data)
    for batch in itertools.islice(batches, 2):
        found, _ = step(found, batch)
    check_same_bits(arrays(step, found), arrays(step, state))


def test_numbers_are_those_of_the_same_rows(tmp_path: Path):
    # The rows themselves, without a step.
    step, batches = step_on(2), Drawn()
    whole = [next(batches) for _ in range(6)]
    for size in (1, 4):
        ahead = step.prefetch(Drawn(), size)
        before = ahead.get_state()
        for batch, expected in zip(itertools.islice(ahead, 3), whole, strict=False):
            np.testing.assert_array_equal(batch, expected)
        three = ahead.get_state()
        for state, first in ((three, 3), (before, 0), (three, 3)):
            ahead.set_state(state)
            assert ahead.get_state() == state
            for batch, expected in zip(itertools.islice(ahead, 3), whole[first:][:3], strict=True):
                np.testing.assert_array_equal(batch, expected)


@pytest.mark.parametrize("where", deep_but(["folder"], ["folder", "memory"]))
@pytest.mark.parametrize(
    "of",
    [
        lambda rows, other: {"epoch": 3, "rows": rows, "none": None, "seen": [1.5, {"a": "b"}]},
        lambda rows, other: (rows, {"seen": 5}),
        lambda rows, other: [{"rows": [other, rows]}, [], other],
    ],
    ids=["dict", "tuple", "nested"],
)
def test_json_beside_iterators_comes_back(of: Any, where: str, tmp_path: Path):
    step, batches = step_on(2), Drawn()
    folders = {"folder": tmp_path / "run", "memory": tmp_path / "memory"}
    checkpoints = Checkpoints(step=step, **folders, memory_every=1)
    put = checkpoints.save if where == "folder" else checkpoints.snapshot
    next(batches)
    expected = of(json.loads(json.dumps(batches.get_state())), Bytes(7).get_state())
    given = of(step.prefetch(batches), Bytes(7))
    put(trained(step, 1), given)
    # What the loop changes now is of a later row.
    next(batches)
    if isinstance(given, dict):
        given["seen"].append(2)
    checkpoints.wait()
    _, data = Checkpoints(step=step, **folders).restore_latest(step.abstract_init(PARAMS))
    assert data == expected
    assert type(data) is type(expected)


class Of(Drawn):
    """An iterator with a given state."""

    def __init__(self, state: Any):
        self.state = state

    def get_state(self) -> Any:
        return self.state


BACK, WRITTEN = "would not come back from JSON", "cannot be written as JSON"
STATE = "The state of the iterator"
# What is no JSON, beside an iterator or as its state.
NO_JSON: dict[str, tuple[Any, type[Exception], str]] = {
    "keys": ({3: Drawn()}, ArgumentError, rf"data {BACK}.* got \{{3: None\}}"),
    "tuple": ([Drawn(), (1, 2)], ArgumentError, rf"data {BACK}.* got \(1, 2\)"),
    "set": ([Drawn(), {1}], ArgumentTypeError, "Object of type set is not JSON"),
    "inf": ([Drawn(), float("inf")], ArgumentTypeError, "Out of range float values"),
    "a state beside": ([Of((1, 2)), Drawn()], ArgumentError, f"{STATE} {BACK}"),
    "tuple as state": (Of((1, 2)), ArgumentError, f"{STATE} {BACK}"),
    "array as state": (Of(np.ones(3)), ArgumentTypeError, f"{STATE} {WRITTEN}"),
    "large state": (Of(b"a" * (30 << 20)), ArgumentError, f"{STATE} has 41,943,0"),
    "no state": (iter([1]), ArgumentTypeError, f"data {WRITTEN}: .* get_state and set_state"),
}


@pytest.mark.parametrize("name", deep_but(lambda name: name != "large state", NO_JSON))
def test_what_json_does_not_know_is_refused(name: str, tmp_path: Path):
    given, error, says = NO_JSON[name]
    step = step_on(2)
    with Checkpoints(tmp_path, step) as checkpoints, pytest.raises(error, match=says):
        checkpoints.save(trained(step), given)
    assert checkpoints.steps() == []


def test_what_is_saved_is_the_data_of_that_moment(tmp_path: Path):
    # So large that it is still hashed when the loop goes on.
    step, data = sgd_step(lambda w, x: (w[0] * x).mean(), 0.1, 2), {"at": [0]}
    with Checkpoints(tmp_path, step) as checkpoints:
        state = step.init(np.ones((4000, 1000), np.float32))
        for _ in range(2):
            data["at"][0] += 1
            checkpoints.save(state, data)
            data["at"][0] += 1
    for number, at in ((0, 1), (1, 3)):
        assert checkpoints.restore(state, number)[1] == {"at": [at]}


def test_a_state_that_is_changed_on_disk_is_found(tmp_path: Path):
    step = step_on(2)
    state, batches = trained(step), Drawn()
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, {"first": True})
        checkpoints.save(state, batches)
    file = tmp_path / "00000003" / "manifest" / "manifest.json"
    text = file.read_text()
    state_of = json.loads(text)["data"]["iterators"][0]
    digit = state_of.index("inc") + 9
    other = "1" if state_of[digit] != "1" else "2"
    changed = state_of[:digit] + other + state_of[digit + 1 :]
    file.write_text(text.replace(json.dumps(state_of), json.dumps(changed)))
    with pytest.warns(CheckpointWarning, match="checkpoint 3: the manifest does not have the che"):
        assert checkpoints.restore_latest(state)[1] == {"first": True}
    forgeries = '["bytes", "?"]', "{}", '["bytes", 3]', '["dict", 3]', '["list", 3]', "[" * 9999
    for forged in forgeries:
        file.write_text(text)
        edit(file, lambda body, forged=forged: body["data"].update(iterators=[forged]))
        with pytest.warns(CheckpointWarning, match="checkpoint 3: the manifest has values of a wr"):
            assert checkpoints.restore_latest(state)[1] == {"first": True}


def test_data_of_version_4_comes_back(tmp_path: Path):
    step = step_on(2)
    state = trained(step)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, {"at": 2})

    def older(body: dict[str, Any]) -> None:
        body.update(version=4, data=body["data"]["json"])

    edit(tmp_path / "00000002" / "manifest" / "manifest.json", older)
    assert checkpoints.restore_latest(state)[1] == {"at": 2}


def test_the_state_of_what_is_read_ahead_is_refused(tmp_path: Path):
    step, own = step_on(2), Drawn()
    batches = step.prefetch(own)
    next(batches)
    with Checkpoints(tmp_path, step) as checkpoints:
        for data in (own, {"rows": own}):
            with pytest.raises(ArgumentError, match=r"Drawn.* is read ahead by step\.prefetch, so"):
                checkpoints.save(trained(step), data)
        checkpoints.save(trained(step), batches)
        checkpoints.save(trained(step), Drawn())
        says = r"list_iterator.* get_state and set_state, .* Save where"
        with pytest.raises(ArgumentTypeError, match=says):
            checkpoints.save(trained(step), step.prefetch(iter([ROWS])))


# The best one.


def test_the_best_comes_back_with_its_number_and_its_score(tmp_path: Path):
    step = step_on(2)
    states = [trained(step, steps) for steps in range(4)]
    with Checkpoints(tmp_path / "run", step, keep=1, keep_best=3) as checkpoints:
        like = step.abstract_init(PARAMS)
        with pytest.raises(CheckpointError, match=r"has no checkpoint with a score\. Pass one to"):
            checkpoints.restore_best(like)
        for number, score in enumerate((0.75, 0.25, 0.75, None)):
            checkpoints.save(states[number], {"at": number}, score=score)
        found, *others = checkpoints.restore_best(like)
        assert checkpoints.scores() == {0: 0.75, 1: 0.25, 2: 0.75}
    assert others == [{"at": 2}, 2, 0.75]
    check_same_bits(arrays(step, found), arrays(step, states[2]))
    assert checkpoints.restored_from == f"Checkpoint 2 in {tmp_path / 'run'}"
    again = Checkpoints(shutil.copytree(tmp_path / "run", tmp_path / "two"), step)
    assert again.steps() == [0, 1, 2, 3]
    for damaged, (number, score) in ((2, (0, 0.75)), (0, (1, 0.25))):
        (tmp_path / "two" / f"{damaged:08}" / "manifest" / "manifest.json").write_text("{}")
        with pytest.warns(CheckpointWarning, match=f"checkpoint {number} is taken"):
            assert again.restore_best(like)[1:] == ({"at": number}, number, score)
    (tmp_path / "two" / "00000001" / "manifest" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointDamagedError, match=r"No checkpoint with a score in .* is whole"):
        again.restore_best(like)


def test_the_best_is_on_disk_even_if_a_snapshot_is_newer(tmp_path: Path):
    step = step_on(2)
    folders = {"folder": tmp_path / "run", "memory": tmp_path / "memory", "memory_every": 1}
    checkpoints = Checkpoints(step=step, keep_best=1, **folders)
    checkpoints.save(trained(step, 1), "best", score=-1.5)
    checkpoints.snapshot(trained(step, 3), "newest")
    checkpoints.wait()
    like = step.abstract_init(PARAMS)
    assert Checkpoints(step=step, **folders).restore_latest(like)[1] == "newest"
    assert checkpoints.restore_best(like)[1:] == ("best", 1, -1.5)


# Several processes.


def main(process: int, port: int, out: str, folder: str, kind: str, what: str) -> None:
    """One process: train, save or restore, and write down its rows and its parameters."""
    join(process, port, PROCESSES)
    step, said, order = step_on(4), dict[str, Any](), []
    own = Drawn(process, 8) if kind == "own" else grain_rows(process, PROCESSES)
    batches, memory = step.prefetch(own, 2), f"{folder}-memory" if what == "memory" else None
    with Checkpoints(folder, step, memory=memory, memory_every=1, keep_best=1) as checkpoints:
        found = checkpoints.restore_latest(step.abstract_init(PARAMS))
        state, where = found or (step.init(PARAMS), batches.get_state())
        batches.set_state(where)
        if what == "mixed":
            with pytest.raises(ArgumentError) as refused:
                checkpoints.save(state, batches if process else {"at": 0})
            said["mixed"] = str(refused.value)
        for batch in itertools.islice(batches, 3):
            order.append(first_numbers(batch))
            state, _ = step(state, batch)
            if memory:
                checkpoints.snapshot(state, batches)
            elif int(state.step) == 2:
                checkpoints.save(state, batches, score=float(process == 0))
                where = batches.get_state()
        checkpoints.wait()
        if what == "best":
            _, state_of, number, score = checkpoints.restore_best(step.abstract_init(PARAMS))
            said["best"] = [state_of == where, number, score]
    said |= {
        "rows": order,
        "params": [np.asarray(x).tolist() for x in jax.tree.leaves(state.params)],
    }
    Path(out).write_text(json.dumps(said))
    jax.distributed.shutdown()


def first_numbers(batch: Any) -> list[float]:
    """The first number of each row that this process has."""
    if isinstance(batch, np.ndarray):
        return batch[:, 0].tolist()
    parts = sorted(batch.addressable_shards, key=lambda each: each.index[0].start or 0)
    return np.concatenate([np.asarray(part.data) for part in parts])[:, 0].tolist()


def started(tmp_path: Path, *words: str) -> list[Any]:
    return run_processes("checkpoints.test_data", tmp_path, *words, processes=PROCESSES)


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["folder", "memory", "best"])
def test_each_process_goes_on_with_its_own(what: str, tmp_path: Path):
    folder = str(tmp_path / "run")
    first = started(tmp_path, folder, "own", what)
    again = started(tmp_path, folder, "own", what)
    for process, (one, other) in enumerate(zip(first, again, strict=True)):
        batches = Drawn(process, 8)
        expected = [next(batches)[:, 0].tolist() for _ in range(6)]
        # Of three batches the disk has the second, the memory the third.
        after = 3 if what == "memory" else 2
        assert one["rows"] == expected[:3]
        assert other["rows"] == expected[after : after + 3]
        if what == "best":
            assert one["best"] == other["best"] == [True, 2, 1.0]
    assert again[0]["params"] == again[1]["params"]
    if what == "folder":
        step = step_on(4)
        checkpoints, like = Checkpoints(folder, step), step.abstract_init(PARAMS)
        says = "its 2 processes have different states, or other JSON beside them, and here are 1"
        with pytest.raises(CheckpointMismatchError, match=says):
            checkpoints.restore_latest(like)
        with pytest.warns(CheckpointWarning, match=says):
            state, data = checkpoints.restore_latest(like, strict=False)
        assert (int(state.step), data) == (2, None)


@pytest.mark.deep
@pytest.mark.multiprocess
def test_grain_goes_on_in_another_number_of_processes(tmp_path: Path):
    pytest.importorskip("grain")
    step, folder, batches = step_on(4), tmp_path / "run", grain_rows()
    whole = [np.asarray(next(batches)) for _ in range(6)]
    rows = lambda batches: [sorted(np.asarray(batch)[:, 0].tolist()) for batch in batches]
    # One process, then two, then one.
    batches = step.prefetch(grain_rows())
    with Checkpoints(folder, step) as checkpoints:
        state = step.init(PARAMS)
        state, _ = step(state, next(batches))
        checkpoints.save(state, batches)
    two = started(tmp_path, str(folder), "grain", "folder")
    found = [
        sorted(one + other) for one, other in zip(*(each["rows"] for each in two), strict=True)
    ]
    assert found == rows(whole[1:4])
    expected = step.init(PARAMS)
    for batch in whole[:4]:
        expected, _ = step(expected, batch)
    for one, other in zip(two[0]["params"], jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    # The two have saved after the second batch of all.
    state, where = Checkpoints(folder, step).restore_latest(step.abstract_init(PARAMS))
    batches.set_state(where)
    assert int(state.step) == 2
    assert rows(itertools.islice(batches, 3)) == rows(whole[2:5])


@pytest.mark.deep
@pytest.mark.multiprocess
def test_json_in_one_process_and_an_iterator_in_another_are_refused(tmp_path: Path):
    for said in started(tmp_path, str(tmp_path / "run"), "own", "mixed"):
        assert "Process 1 is at save an iterator, and process 0 at save." in said["mixed"]
