"""Workers that train alone and synchronise rarely: against a model in numpy, on other workers."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import crossshard
from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, DivergenceError
from crossshard.pipeline import Quantized
from tests.quick import deep_but
from tests.step.common import assert_same, sgd_step
from tests.step.workers import (
    INNER,
    NESTEROV,
    PARAMS,
    SIZE,
    STEPS,
    WORKERS,
    N,
    Sgd,
    X,
    Y,
    damaged,
    loss_fn,
    on_a_line,
    sent_by,
    step_of,
    train,
    train_alone,
)

# The same in numpy and float64.


def in_numpy(workers: int, every: int, inner: Any, outer: Any, steps: int = STEPS) -> Any:
    """The anchor, and the parameters of each worker."""
    anchor = {name: np.float64(x) for name, x in PARAMS.items()}
    each, optimizers = [dict(anchor) for _ in range(workers)], [inner() for _ in range(workers)]
    for t in range(steps):
        train_alone(each, optimizers, t)
        if (t + 1) % every == 0:
            moved = {n: np.mean([x - params[n] for params in each], 0) for n, x in anchor.items()}
            for name, update in outer(moved).items():
                anchor[name] = anchor[name] + update
            each = [dict(anchor) for _ in range(workers)]
    return anchor, each


@pytest.mark.parametrize("update", deep_but(("sharded",), ["replicated", "sharded"]))
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("inner", INNER)
def test_diloco_is_that_of_numpy(inner: str, workers: int, update: str):
    ours, theirs = INNER[inner]
    outer = optax.sgd(**NESTEROV)
    step = step_of(workers, ours(), outer_optimizer=outer, weight_update=update)
    for steps in (STEPS, STEPS - 2):
        state = train(step, step.init(PARAMS), range(steps))
        anchor, each = in_numpy(workers, 4, theirs, Sgd(**NESTEROV), steps)
        atol = 1e-6 if inner == "sgd" else 1e-5
        for name, want in anchor.items():
            np.testing.assert_allclose(step.model(state)[name], want, rtol=0, atol=atol)
            for shard in range(N) if workers > 1 else ():
                got = step.model(state, shard=shard)[name]
                own = each[shard * workers // N][name]
                np.testing.assert_allclose(got, own, rtol=0, atol=atol)


# Identities.


@pytest.mark.parametrize("update", deep_but(("sharded",), ["replicated", "sharded"]))
@pytest.mark.parametrize("workers", WORKERS)
def test_every_step_and_a_rate_of_one_is_the_synchronous_run(workers: int, update: str):
    plain = sgd_step(loss_fn, 0.25, N, weight_update=update)
    want = plain.model(train(plain, plain.init(PARAMS)))
    step = step_of(workers, optax.sgd(0.25), sync_every=1, weight_update=update)
    state = train(step, step.init(PARAMS))
    if workers in (1, 8):
        # Powers of two, so that a mean of products is the product with the mean, bit by bit.
        assert_same(step.model(state), want)
    if workers > 1:
        # Workers of several shards add in another order.
        atol = 0 if workers == 8 else 1e-7
        for name, x in want.items():
            np.testing.assert_allclose(step.model(state, shard=5)[name], x, rtol=0, atol=atol)
    rough = step_of(workers, optax.sgd(0.3), sync_every=1, weight_update=update)
    other = sgd_step(loss_fn, 0.3, N, weight_update=update)
    got = rough.model(train(rough, rough.init(PARAMS)))
    want = other.model(train(other, other.init(PARAMS)))
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-6)


def test_a_rate_of_zero_leaves_the_parameters():
    step = step_of(4, outer_optimizer=optax.sgd(0.0))
    state = train(step, step.init(PARAMS))
    assert_same(step.model(state), PARAMS)
    assert_same(step.model(state, shard=3), PARAMS)


def test_one_step_goes_the_way_of_the_workers():
    # The pseudogradient points from where they went: a rate of 1 goes there, half of it half way.
    ends = {}
    for rate in (0.5, 1.0):
        step = step_of(8, outer_optimizer=optax.sgd(rate))
        ends[rate] = step.model(train(step, step.init(PARAMS), range(4)))["w"] - PARAMS["w"]
    np.testing.assert_allclose(2 * ends[0.5], ends[1.0], rtol=0, atol=1e-6)
    alone = step_of(8, sync_every=100)
    state = train(alone, alone.init(PARAMS), range(4))
    mean = np.asarray(state.params["w"]).mean(0) - PARAMS["w"]
    np.testing.assert_allclose(ends[1.0], mean, rtol=0, atol=1e-6)


# What is sent.


@pytest.mark.parametrize("workers", deep_but((4,), [8, 4, 2]))
def test_the_bytes_of_a_synchronisation(workers: int):
    always, seldom = sent_by(step_of(workers, weight_update="replicated"))
    size = N // workers
    inside = 2 * (size - 1) / size * SIZE
    assert always == pytest.approx(inside, rel=0.01, abs=100)
    # One worker's shards send the same, each to its like in the others.
    assert seldom == pytest.approx(2 * (workers - 1) / workers * SIZE, rel=0.01)


def test_the_bytes_where_each_shard_has_a_slice():
    always, seldom = sent_by(step_of(4, optax.adam(1e-3), weight_update="sharded"))
    assert always == pytest.approx(2 * 1 / 2 * SIZE, rel=0.01)
    # Of half of them between the workers, and the other half inside.
    assert seldom == pytest.approx((2 * 3 / 4 * 1 / 2 + 1 / 2) * SIZE, rel=0.01)


def test_thirty_steps_and_four_bits_are_a_two_hundredth():
    plain = sent_by(sgd_step(loss_fn, 0.1, N, weight_update="replicated"))[0]
    step = step_of(8, sync_every=30, outer_reduce_dtype="int4")
    always, seldom = sent_by(step)
    assert (always + seldom / 30) / plain <= 1 / 200
    always, seldom = sent_by(step_of(8, sync_every=30))
    assert (always + seldom / 30) / plain == pytest.approx(1 / 30, rel=0.01)


def test_few_bits_of_slices():
    options: Any = {"outer_reduce_dtype": "int8", "weight_update": "sharded"}
    always, seldom = sent_by(step_of(2, optax.adam(1e-3), **options))
    assert always == pytest.approx(2 * 3 / 4 * SIZE, rel=0.01)
    # Of a quarter between the workers in 8 bits; inside of one what is gathered, and what is held.
    assert seldom == pytest.approx((2 * 1 / 2 * 0.254 / 4 + 3 / 4 + 3 / 4) * SIZE, rel=0.03)


@pytest.mark.parametrize(
    "wire",
    deep_but(("int4",), ["int8", "int4", Quantized("int4", "stochastic"), "bfloat16"]),
    ids=str,
)
def test_few_bits_lose_nothing(wire: Any):
    # What was not sent of a pseudogradient is in the next one.
    step = step_of(8, outer_reduce_dtype=wire, sync_every=2)
    plain = step_of(8, sync_every=2)
    got, want = (each.model(train(each, each.init(PARAMS)))["w"] for each in (step, plain))
    off = np.abs(got - want).max() / np.abs(want - PARAMS["w"]).max()
    assert 1e-6 < off < 0.05
    state = train(step, step.init(PARAMS), range(2))
    held = state.opt_state.outer.aggregate
    if wire != "bfloat16":
        exact = step_of(8, sync_every=2)
        both = exact.model(train(exact, exact.init(PARAMS), range(2)))["w"] - PARAMS["w"]
        sent = np.float64(step.model(state)["w"]) - PARAMS["w"]
        left = np.float64(held.residual["w"]).sum(0)
        np.testing.assert_allclose(sent - left, both, rtol=0, atol=1e-6)


def test_a_nan_that_a_worker_holds_back_does_not_reach_the_anchor():
    step = step_of(8, sync_every=2, outer_reduce_dtype="int8")
    state = train(step, step.init(PARAMS), range(2))
    outer = state.opt_state.outer
    held = outer.aggregate.residual["w"]
    bad = {
        **outer.aggregate.residual,
        "w": jax.device_put(held.at[3, 2].set(np.nan), held.sharding),
    }
    outer = outer._replace(aggregate=outer.aggregate._replace(residual=bad))
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(outer=outer))
    state = train(step, state, range(2))
    for x in jax.tree.leaves((state.params, state.opt_state.outer)):
        assert np.isfinite(x).all()


def test_chance_does_not_part_the_shards_of_a_worker():
    step = step_of(4, outer_reduce_dtype=Quantized("int4", "stochastic"))
    state = train(step, step.init(PARAMS), range(8))
    for name, x in state.opt_state.outer.anchor.items():
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, step.model(state)[name])
        for copy in np.asarray(state.params[name]):
            np.testing.assert_array_equal(copy, step.model(state)[name])


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("workers", deep_but((4,), [4, 8]))
def test_what_workers_hold_back_goes_to_others(workers: int, update: str):
    step = step_of(workers, outer_reduce_dtype="int4", sync_every=2, weight_update=update)
    state = train(step, step.init(PARAMS), range(2))
    exact = step_of(workers, sync_every=2)
    both = exact.model(train(exact, exact.init(PARAMS), range(2)))["w"]
    lacks = both - np.float64(step.model(state)["w"])
    for other_workers in (2, 4, 8):
        other = step_of(other_workers, outer_reduce_dtype="int4", sync_every=2)
        moved = other.reshard(step.unshard(state))
        held = np.float64(moved.opt_state.outer.aggregate.residual["w"]).sum(0)
        np.testing.assert_allclose(-held, lacks, rtol=0, atol=1e-6)
    assert np.abs(lacks).max() > 1e-4


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("workers", deep_but((4,), [8, 4, 2]))
def test_several_rounds_lose_nothing_either(workers: int, update: str):
    options: Any = {"sync_every": 2, "outer_reduce_dtype": "int4", "weight_update": update}
    step, state, exact = on_a_line(workers, 64, 6, **options)
    sent = np.float64(step.model(state))
    held = np.float64(state.opt_state.outer.aggregate.residual).sum(0)
    assert np.abs(sent - exact).max() > 1e-3
    np.testing.assert_allclose(sent - held, exact, rtol=0, atol=2e-6)


# Going on.


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("workers", deep_but((4,), [8, 4]))
def test_a_run_goes_on_in_the_middle_of_a_round(tmp_path: Path, workers: int, streaming: bool):
    options: Any = {"outer_optimizer": optax.sgd(**NESTEROV), "outer_reduce_dtype": "int8"}
    options["sync_streaming"] = streaming
    step = step_of(workers, optax.adam(0.01), **options)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(train(step, step.init(PARAMS), range(6)))
    again = step_of(workers, optax.adam(0.01), **options)
    with Checkpoints(tmp_path, again) as checkpoints:
        state, _ = checkpoints.restore_latest(again.init(PARAMS))
    state = train(again, state, range(6, STEPS))
    want = train(step, step.init(PARAMS))
    assert_same(jax.device_get(state.params), jax.device_get(want.params))
    assert_same(jax.device_get(state.opt_state), jax.device_get(want.opt_state))


@pytest.mark.parametrize("way", deep_but(("reshard",), ["reshard", "checkpoints"]))
@pytest.mark.parametrize(
    ("before", "after"), [((8, 8), (4, 4)), ((4, 8), (2, 8)), ((2, 8), (4, 4))]
)
def test_other_workers_go_on(
    tmp_path: Path, way: str, before: tuple[int, int], after: tuple[int, int]
):
    """From some workers of so many shards to others: at a synchronisation, and between two."""

    def made(workers: int, shards: int) -> Any:
        size = shards // workers
        groups = np.arange(shards).reshape(workers, size).tolist()
        opt = CrossShardOptimizer(optax.adam(0.01), group_assignment=groups)
        outer = optax.sgd(**NESTEROV)
        return make_train_step(loss_fn, opt, num_shards=shards, sync_every=4, outer_optimizer=outer)

    one, other = made(*before), made(*after)
    for steps in (8, 6):
        state = train(one, one.init(PARAMS), range(steps))
        mean = {name: np.float64(x).mean(0) for name, x in jax.device_get(state.params).items()}
        anchor = one.model(state)
        if way == "reshard":
            moved = other.reshard(one.unshard(state))
        else:
            folder = tmp_path / str(steps)
            with Checkpoints(folder, one) as checkpoints:
                checkpoints.save(state)
            with Checkpoints(folder, other) as checkpoints:
                moved, _ = checkpoints.restore_latest(other.init(PARAMS))
        assert_same(other.model(moved), anchor)
        for name, x in jax.device_get(moved.params).items():
            assert x.shape[0] == after[1]
            np.testing.assert_allclose(x, np.broadcast_to(mean[name], x.shape), atol=1e-7, rtol=0)
        outer = jax.device_get(moved.opt_state.outer.inner_state)
        assert_same(outer, jax.device_get(state.opt_state.outer.inner_state))
        assert moved.opt_state.outer.count == steps
        inner = jax.device_get(other.unshard(moved).opt_state.inner_state[0].mu["w"])
        for x in inner:
            np.testing.assert_array_equal(x, inner[0])
        moved = train(other, moved, range(steps, STEPS - 1))
        # The shards of a worker are one.
        of_each = np.asarray(moved.params["w"])
        for group in np.arange(after[1]).reshape(after[0], -1):
            for shard in group:
                np.testing.assert_array_equal(of_each[shard], of_each[group[0]])


def test_what_is_held_back_inside_a_worker_stays_with_it():
    step = step_of(4, reduce_dtype="int8")
    state = train(step, step.init(PARAMS), range(3))
    held = state.opt_state.aggregate.residual["w"]
    same = step.reshard(step.unshard(state)).opt_state.aggregate.residual["w"]
    np.testing.assert_array_equal(same, held)
    moved = step_of(2, reduce_dtype="int8").reshard(step.unshard(state))
    assert np.asarray(held).any()
    assert not np.asarray(moved.opt_state.aggregate.residual["w"]).any()


def test_parts_of_workers_go_on_with_what_they_have():
    step = step_of(4, optax.adam(0.01), reduce_dtype="int8")
    state = train(step, step.init(PARAMS), range(3))
    parts = step_of(8, optax.adam(0.01), reduce_dtype="int8")
    moved = parts.reshard(step.unshard(state))
    assert np.ptp(np.asarray(moved.params["w"]), axis=0).any()
    whole = jax.device_get((step.unshard(state).params, step.unshard(state).opt_state))
    assert_same(jax.device_get((moved.params, parts.unshard(moved).opt_state)), whole)


def test_a_single_worker_takes_no_state_of_several_nor_they_its_own():
    several, one = step_of(4), step_of(1)
    for before, after in ((several, one), (one, several)):
        with pytest.raises(ArgumentError, match=r"init with them"):
            after.reshard(before.unshard(before.init(PARAMS)))


# What goes with it.


def test_evaluation_is_of_the_anchor():
    step = step_of(4)
    state = train(step, step.init(PARAMS), range(6))
    metric = lambda params, batch: ((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2).mean(1)
    found = step.evaluate(state, [(X[0], Y[0])], metric)
    anchor, _ = in_numpy(4, 4, lambda: Sgd(0.3), Sgd(1.0), 6)
    want = ((X[0] @ anchor["w"] + anchor["b"] - Y[0]) ** 2).mean()
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_skipped_steps_count_so_that_all_meet():
    step = step_of(8, nonfinite="skip")
    state = step.init(PARAMS)
    for t in range(8):
        x = X[t].copy()
        x[0, 0] = np.nan if t in (1, 3) else x[0, 0]
        state, _ = step(state, (x, Y[t]))
    assert state.opt_state.outer.count == 8
    for name, x in jax.device_get(state.params).items():
        assert np.isfinite(x).all()
        assert_same(x[0], x[7])
        assert_same(x[0], step.model(state)[name])


@pytest.mark.parametrize("copy", ["anchor", "trace"])
def test_the_sentinel_sees_a_copy_that_differs(copy: str):
    step = step_of(4, outer_optimizer=optax.sgd(**NESTEROV), check_divergence=1)
    state = train(step, step.init(PARAMS), range(5))
    outer = state.opt_state.outer
    if copy == "anchor":
        outer = outer._replace(anchor=outer.anchor | {"w": damaged(outer.anchor["w"])})
    else:
        trace = outer.inner_state[0]
        trace = trace._replace(trace=trace.trace | {"w": damaged(trace.trace["w"])})
        outer = outer._replace(inner_state=(trace, *outer.inner_state[1:]))
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(outer=outer))
    with pytest.raises(DivergenceError, match=r"[Ss]hard 3"):
        train(step, state, range(5, STEPS))


def test_it_says_what_it_does_and_verifies():
    step = step_of(4, outer_optimizer=optax.sgd(**NESTEROV), outer_reduce_dtype="int8")
    step.init(PARAMS)
    text = step.describe().splitlines()[0]
    every = "every 4 steps the mean over the workers in int8 with error feedback"
    assert text.endswith(f"→ {every}, and the outer update")
    assert crossshard.verify(step, PARAMS, (X[0], Y[0])).ok


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no number": ({"sync_every": 0}, ArgumentError, "sync_every must be at least 1"),
    "a word": ({"sync_every": "often"}, ArgumentTypeError, "It counts steps"),
    "an outer optimizer alone": (
        {"sync_every": None, "outer_optimizer": optax.sgd(1.0)},
        ArgumentError,
        "Say for how many: sync_every=20",
    ),
    "a dtype alone": (
        {"sync_every": None, "outer_reduce_dtype": "int8"},
        ArgumentError,
        "outer_reduce_dtype is for workers",
    ),
    "wrapped": (
        {"outer_optimizer": CrossShardOptimizer(optax.sgd(1.0))},
        ArgumentTypeError,
        "without CrossShardOptimizer",
    ),
    "no optimizer": ({"outer_optimizer": optax.sgd}, ArgumentTypeError, "outer_optimizer must be"),
    "no dtype": ({"outer_reduce_dtype": "int3"}, ArgumentError, "outer_reduce_dtype must be"),
    "by axis": ({"outer_reduce_dtype": {"a": "int8"}}, ArgumentError, "one for all axes"),
    "parts": ({"params": "sharded"}, ArgumentError, "each worker has its own"),
    "a loss over the batch": (
        {"loss_over": "batch"},
        ArgumentError,
        "one loss, of the whole batch",
    ),
    "masters": ({"master_dtype": "float32"}, ArgumentError, "would not reach"),
    "ema": ({"ema": 0.9}, ArgumentError, "averages the parameters of one worker"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str):
    options, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        step_of(8, **options)


def test_an_optimizer_does_not_take_it():
    with pytest.raises(ArgumentTypeError, match=r"make_train_step\(\.\.\., sync_every=\.\.\.\)"):
        CrossShardOptimizer(optax.sgd(0.1), sync_every=4)
