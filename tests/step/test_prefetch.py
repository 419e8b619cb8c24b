"""step.prefetch: the numbers are those of the same loop without it, and its thread ends."""

import contextlib
import gc
import itertools
import json
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import _jax, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, CrossshardError
from crossshard.step import Prefetch
from tests.processes import join, run_processes
from tests.quick import deep_but
from tests.step.common import sgd_step, train

RNG = np.random.default_rng(0)
W = np.float32(RNG.normal(size=(4, 2)))
X, Y = np.float32(RNG.normal(size=(2, 6, 32, 4)))
BATCHES = [
    {"x": x, "y": y[:, :2], "mask": np.float32(y[:, 0] > -1)} for x, y in zip(X, Y, strict=True)
]
# The threads in which JAX has traced, lowered or compiled.
COMPILED: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def note(event: str, seconds: float, **more: object) -> None:
    COMPILED.append(threading.current_thread().name)


def loss_fn(w: Any, batch: Any) -> jax.Array:
    return ((batch["x"] @ w - batch["y"]) ** 2).mean()


def masked(w: Any, batch: Any) -> jax.Array:
    errors = ((batch["x"] @ w - batch["y"]) ** 2).mean(1)
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


def sizes(batches: Any, *numbers: int) -> Iterator[Any]:
    """The batches with these numbers of rows, in turn."""
    for batch, number in zip(batches, itertools.cycle(numbers), strict=False):
        yield jax.tree.map(lambda x, number=number: x[:number], batch)


def reader_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "crossshard"]


def run(step: Any, batches: Any, params: Any = W) -> list[np.ndarray]:
    """The losses, and the arrays of the last state."""
    state, losses = step.init(params), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    leaves = [x for x in jax.tree.leaves(state) if x.dtype != state.rng.dtype]
    return jax.device_get([*losses, *leaves])


# What a batch is, and where it goes: what a step does with it then is of no matter here.
CASES: dict[str, Any] = {
    "sizes and weights": lambda: (masked, {"weight": "mask"}, sizes(BATCHES, 32, 16, 13, 29), W),
    "bfloat16": lambda: (
        *(loss_fn, {}, [jax.tree.map(lambda x: x.astype(jnp.bfloat16), b) for b in BATCHES]),
        W.astype(jnp.bfloat16),
    ),
    "float64 from numpy": lambda: (
        *(loss_fn, {}, [jax.tree.map(lambda x: x.astype(np.float64), b) for b in BATCHES], W),
    ),
    "rows along axis 1": lambda: (
        lambda w, x: ((w @ x - 1) ** 2).mean(),
        *({"batch_axis": 1}, [np.ascontiguousarray(b["x"].T) for b in BATCHES], W.T),
    ),
    "whole entries": lambda: (
        lambda w, b: ((b["x"] @ w * b["by"]) ** 2).mean() + b["table"].sum(),
        {"replicated_entries": ("by", "table")},
        [{"x": b["x"], "by": n / 3, "table": np.full(3, n)} for n, b in enumerate(BATCHES)],
        W,
    ),
}


@pytest.mark.parametrize("name", deep_but(["sizes and weights"], CASES))
def test_the_same_bits_as_without(name: str):
    loss, options, batches, params = CASES[name]()
    options = options if "mesh" in options else {"num_shards": 8, **options}
    step = make_train_step(loss, optax.sgd(0.1, 0.9), **options)
    batches = list(batches)
    expected = run(step, batches, params)
    COMPILED.clear()
    for size in (1, 2, 10):
        found = run(step, step.prefetch(batches, size), params)
        assert [x.tobytes() for x in found] == [x.tobytes() for x in expected]
    assert "crossshard" not in COMPILED
    assert not reader_threads()


def test_rows_are_placed_as_the_step_places_them():
    step = sgd_step(masked, 0.1, 8, weight="mask")
    placed = list(step.prefetch(sizes(BATCHES, 16, 32, 16, 13, 32)))
    # Fewer rows than before, and rows that do not divide, are left to the call.
    kinds = [{isinstance(x, jax.Array) for x in batch.values()} for batch in placed]
    assert kinds == [{True}, {True}, {False}, {False}, {True}, {False}]
    for x in placed[1].values():
        assert x.sharding == jax.NamedSharding(step.mesh, jax.P(("shards",)))
    np.testing.assert_array_equal(placed[1]["x"], BATCHES[1]["x"])


@pytest.mark.parametrize("rows", [64, 61])
def test_a_loader_may_fill_its_arrays_again(rows: int):
    def refilled() -> Iterator[Any]:
        x = np.empty((rows, 4), np.float32)
        for number in range(4):
            x[:] = number
            yield x

    found = sgd_step(lambda w, x: (x @ w).mean(), 0.1, 8).prefetch(refilled(), 3)
    first = next(found)
    time.sleep(0.1)
    assert [int(each[0, 0]) for each in [first, *found]] == [0, 1, 2, 3]


def test_what_is_read_ahead_is_counted():
    step, read = sgd_step(loss_fn, 0.1, 8), []
    batches = step.prefetch((read.append(0) or batch for batch in BATCHES), 2)
    assert not read
    for taken in range(1, 4):
        next(batches)
        while len(read) < taken + 2:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(read) == taken + 2


def test_its_thread_ends_with_the_loop_and_the_next_loop_goes_on():
    step = sgd_step(loss_fn, 0.1, 8)
    numbers = lambda batches: [float(np.asarray(batch)[0]) for batch in batches]
    batches = step.prefetch(np.full(8, number, np.float32) for number in range(10))
    found = []
    for batch in batches:
        found += numbers([batch])
        assert len(reader_threads()) == 1
        if len(found) == 2:
            break
    assert not reader_threads()
    with contextlib.suppress(KeyError):
        for batch in batches:
            found += numbers([batch])
            raise KeyError
    assert not reader_threads()
    found += numbers(itertools.islice(batches, 2))
    assert not reader_threads()
    found += numbers([next(batches)])
    assert len(reader_threads()) == 1
    found += numbers(batches)
    assert found == [*range(10)]
    assert not reader_threads()
    assert list(batches) == []


def test_its_thread_ends_when_the_iterator_is_dropped():
    batches = sgd_step(loss_fn, 0.1, 8).prefetch(itertools.repeat(BATCHES[0]))
    next(batches)
    cycle = [batches]
    cycle.append(cycle)
    assert reader_threads()
    del batches, cycle
    gc.collect()
    assert not reader_threads()


def test_an_error_of_the_loader_is_raised_in_the_loop():
    error, taken = LookupError("no such file"), []

    def loader() -> Iterator[Any]:
        yield BATCHES[0]
        raise error

    with pytest.raises(LookupError) as raised:
        taken.extend(sgd_step(loss_fn, 0.1, 8).prefetch(loader(), 3))
    assert raised.value is error
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[0] == "test_an_error_of_the_loader_is_raised_in_the_loop"
    assert names[-1] == "loader"
    assert not reader_threads()


def test_errors_of_a_batch_are_those_of_the_step():
    step = sgd_step(loss_fn, 0.1, 8)
    masked_array = np.ma.masked_array(BATCHES[0]["x"], mask=np.isnan(BATCHES[0]["x"]))
    for bad in (
        *({}, {"x": 1.0}, BATCHES[0] | {"x": np.ones((0, 4))}, BATCHES[0] | {"x": X[0, :12]}),
        *(BATCHES[0] | {"x": masked_array}, BATCHES[0] | {"x": X[0].astype(">f4")}),
    ):
        told = []
        for batches in ([bad], step.prefetch([bad])):
            with pytest.raises(CrossshardError) as raised:
                train(step, step.init(W), batches)
            told.append(str(raised.value))
        assert told[0] == told[1]


def test_wide_numbers_stay_wide():
    with jax.enable_x64(True):
        step = sgd_step(lambda w, x: (x * w).mean(), 0.1, 8)
        (batch,) = step.prefetch([np.full(8, 1 / 3)])
        assert batch.dtype == np.float64
        assert float(batch[0]) == 1 / 3


def test_what_is_refused():
    step = sgd_step(loss_fn, 0.1, 8)
    for batches in (BATCHES[0], BATCHES[0]["x"], "file", 3):
        with pytest.raises(ArgumentTypeError, match=r"iterable of batches; got .* Write \[batch\]"):
            step.prefetch(batches)
    with pytest.raises(ArgumentError, match="size must be at least 1; got 0"):
        step.prefetch(BATCHES, 0)
    with pytest.raises(ArgumentTypeError, match="size must be an int"):
        step.prefetch(BATCHES, 2.5)
    with pytest.raises(ArgumentTypeError, match=r"no get_state and set_state, .* as JSON"):
        step.prefetch(iter(BATCHES)).get_state()
    with pytest.raises(ArgumentTypeError, match=r"no get_state and set_state, .* as JSON"):
        step.prefetch(iter(BATCHES)).set_state(3)
    assert isinstance(step.prefetch(BATCHES), Prefetch)


# Several processes.

FEATURES: dict[str, Any] = {
    "plain": (loss_fn, {}, (16,)),
    "float64": (loss_fn, {}, (16,)),
    "weights": (masked, {"weight": "mask"}, (16, 12, 8)),
    "parts": (loss_fn, {"params": "sharded", "accumulate_steps": 2}, (16, 8)),
}


def main(process: int, port: int, out: str) -> None:
    """One process: the bits with and without, and in which threads it talked to others."""
    join(process, port)
    talked, own = set(), _jax.kv_set
    _jax.kv_set = lambda *args: (talked.add(threading.current_thread().name), own(*args))[1]
    said: dict[str, Any] = {}

    def slow(batches: Any) -> Iterator[Any]:
        # Each process is another batch ahead.
        for number, batch in enumerate(batches):
            time.sleep(0.05 * ((number + process) % 2))
            yield batch

    for name, (loss, options, numbers) in FEATURES.items():
        step = sgd_step(loss, 0.1, 4, **options)
        own_rows = [jax.tree.map(lambda x: x[process * 16 :][:16], b) for b in BATCHES]
        if name == "float64":
            own_rows = [jax.tree.map(np.float64, b) for b in own_rows]
        batches = list(sizes(own_rows, *numbers))
        params = np.float32(np.tile(W, (1, 1)))
        values = lambda w, batch: jnp.tanh(batch["x"] @ w)
        expected, state = run(step, batches, params), step.init(params)
        COMPILED.clear()
        kinds: list[bool] = []
        taken = lambda b, k=kinds: [k.append(isinstance(b["x"], jax.Array)), b][1]
        found = run(step, map(taken, step.prefetch(slow(batches))), params)
        evaluated = [
            np.asarray(step.evaluate(state, given, values)).tobytes()
            for given in (batches, step.prefetch(slow(batches)))
        ]
        said[name] = {
            "same": [a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True)],
            "evaluated": evaluated[0] == evaluated[1],
            "placed": sum(kinds),
            "compiled": "crossshard" in COMPILED,
        }
    said["talked"] = sorted(talked)
    Path(out).write_text(json.dumps(said))
    jax.distributed.shutdown()


@pytest.mark.deep
@pytest.mark.multiprocess
def test_in_two_processes(tmp_path: Path):
    for said in run_processes("step.test_prefetch", tmp_path):
        assert said.pop("talked") == ["MainThread"]
        assert set(said) == set(FEATURES)
        for name, found in said.items():
            assert all(found["same"]), name
            assert found["evaluated"], name
            assert not found["compiled"], name
            assert found["placed"] >= 2, name
