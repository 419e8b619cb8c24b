"""Workers that synchronise rarely, or a piece in every step: what is sent, and other workers.

That they train as numpy does hold the combinations, by their factor `workers`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointMismatchError,
    CheckpointWarning,
)
from crossshard.pipeline import Quantized
from tests.quick import deep, deep_but
from tests.step.common import assert_close, assert_same

N, STEPS, ROWS = 8, 12, 32
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(64, 40)).astype(np.float32) / 10,
    "b": np.zeros(40, np.float32),
}
X = RNG.normal(size=(STEPS, ROWS, 64)).astype(np.float32)
Y = np.tanh(X @ RNG.normal(size=(64, 40)).astype(np.float32) / 8)
# The rows of each worker follow each other.
WORKERS = {
    8: None,
    4: [[0, 1], [2, 3], [4, 5], [6, 7]],
    2: [[0, 1, 2, 3], [4, 5, 6, 7]],
    1: [[*range(8)]],
}
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
OUTER: Any = {"outer_optimizer": optax.sgd(**NESTEROV)}
STREAMING: Any = {"sync_streaming": True}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return ((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2).mean()


def step_of(workers: int, inner: Any = None, **options: Any) -> Any:
    opt = CrossShardOptimizer(inner or optax.sgd(0.3), group_assignment=WORKERS[workers])
    return make_train_step(loss_fn, opt, **{"num_shards": N, "sync_every": 4} | options)


def train(step: Any, state: Any, steps: Any = range(STEPS)) -> Any:
    for t in steps:
        state, _ = step(state, (X[t], Y[t]))
    return state


def on_a_line(workers: int, length: int, steps: int, **options: Any) -> tuple[Any, Any, Any]:
    """A step and its state after a linear loss, whose way does not depend on what was rounded.

    Returns:
      The step, the state, and the sum of what the workers have moved on average, exactly.
    """
    g = RNG.normal(size=(steps, N, length, 40)).astype(np.float32)
    opt = CrossShardOptimizer(optax.sgd(0.5), group_assignment=WORKERS[workers])
    linear = lambda params, g: (params * g.mean(0)).sum()
    step = make_train_step(linear, opt, num_shards=N, loss_over="shard", **options)
    state = step.init(np.zeros((length, 40), np.float32))
    for each in g:
        state, _ = step(state, each)
    return step, state, -0.5 * np.float64(g).mean(1).sum(0)


def streaming(workers: int, inner: Any = None, **options: Any) -> Any:
    return step_of(workers, inner, **STREAMING | options)


# Identities.


@pytest.mark.deep
def test_any_shape_is_cut_into_pieces_that_lose_nothing():
    params: Any = {
        "number": jnp.float32(0.5),
        "one": jnp.ones((1, 1, 1)),
        "none": jnp.zeros((0, 3)),
        "layers": jnp.asarray(RNG.normal(size=(3, 100, 4)), jnp.float32),
        "wide": jnp.asarray(RNG.normal(size=(2, 1000)), jnp.float32),
        "complex": jnp.ones(5, jnp.complex64),
    }

    def loss(params: Any, x: jax.Array) -> jax.Array:
        squares = [jnp.sum(jnp.abs(p) ** 2) for p in jax.tree.leaves(params)]
        return x.mean() * params["number"] + sum(squares)

    options: Any = {"num_shards": N, "loss_over": "shard"}
    plain = make_train_step(loss, optax.sgd(0.01), **options)
    # All workers see the same, so that they move as one.
    same = [np.full(N, x[0, 0]) for x in X]
    step = make_train_step(loss, optax.sgd(0.01), sync_every=10, sync_streaming=True, **options)
    state, want = step.init(params), plain.init(params)
    for x in same:
        (state, _), (want, _) = step(state, x), plain(want, x)
    for name, x in jax.device_get(want.params).items():
        for own in np.asarray(state.params[name]):
            np.testing.assert_allclose(own, x, rtol=0, atol=1e-6)


def test_the_sum_waits_for_no_gradient():
    # What is synchronised in a step depends on nothing of its batch.
    step = streaming(4, **OUTER)
    one, other = (train(step, step.init(PARAMS), range(6)) for _ in range(2))
    one, _ = step(one, (X[6], Y[6]))
    other, _ = step(other, (100 * X[7], Y[7]))
    assert_same(step.model(one), step.model(other))
    assert not np.array_equal(one.params["w"], other.params["w"])


# What is sent.


def sent_by(step: Any) -> tuple[float, float]:
    """The bytes of parameters by a device in a step that does not synchronise, and in one."""
    report = crossshard.inspect(step.lower(step.init(BIG), (XB, YB)), BIG)
    return report.bytes_sent - report.bytes_in_branches, report.bytes_in_branches


BIG = {"w": np.zeros((256, 512), np.float32), "b": np.zeros(512, np.float32)}
XB, YB = np.zeros((ROWS, 256), np.float32), np.zeros((ROWS, 512), np.float32)
SIZE = sum(x.nbytes for x in BIG.values())


REPLICATED, SHARDED = {"weight_update": "replicated"}, {"weight_update": "sharded"}
PIECES = {"sync_every": 16, "sync_streaming": True}
# Of the parameters, which part a device sends in every step, and which to synchronise.
BYTES: dict[str, tuple[int, dict[str, Any], float, float]] = {
    # One worker's shards send the same, each to its like in the others.
    "8 workers": (8, REPLICATED, 0, 2 * 7 / 8),
    # Of a quarter between the workers in 8 bits; inside of one what is gathered, and what is held.
    "slices in 8 bits": (
        2,
        {"outer_reduce_dtype": "int8", **SHARDED},
        2 * 3 / 4,
        2 * 1 / 2 * 0.254 / 4 + 3 / 4 + 3 / 4,
    ),
    "slices of pieces": (4, {**PIECES, **SHARDED}, 1 + (2 * 3 / 4 * 1 / 2 + 1 / 2) / 16, 0),
}


@pytest.mark.parametrize("name", deep_but([*BYTES][-1:], BYTES))
def test_the_bytes_of_a_step_and_of_a_synchronisation(name: str):
    workers, options, *parts = BYTES[name]
    inner = optax.adam(1e-3) if "slices" in name else None
    for found, part in zip(sent_by(step_of(workers, inner, **options)), parts, strict=True):
        assert found == pytest.approx(part * SIZE, rel=0.03 if "bits" in name else 0.01, abs=100)


@pytest.mark.parametrize(
    ("workers", "update", "pieces", "wire"),
    [
        (4, "sharded", True, "int4"),
        deep((4, "replicated", False, Quantized("int4", "stochastic"))),
        deep((2, "replicated", True, "int8")),
        deep((8, "sharded", False, "int8")),
    ],
    ids=str,
)
def test_few_bits_lose_nothing(workers: int, update: str, pieces: bool, wire: Any):
    """What was not sent of a pseudogradient is in the next one."""
    options: Any = {"outer_reduce_dtype": wire, "weight_update": update}
    options |= {"sync_every": 3, "sync_streaming": True} if pieces else {"sync_every": 2}
    step, state, exact = on_a_line(workers, *((97, 11) if pieces else (64, 6)), **options)
    held = np.float64(state.opt_state.outer.aggregate.residual).sum(0)
    ends = np.float64(step.model(state))
    if pieces:
        ends, (first, second, third) = np.float64(state.params).mean(0), held
        # The windows have 33 rows, and two of the pieces 32.
        held = np.concatenate([first[:32], second[:32], third])
    assert np.abs(ends - exact).max() > 1e-3
    np.testing.assert_allclose(ends - held, exact, rtol=0, atol=3e-6 if pieces else 2e-6)


def test_what_is_held_back_of_an_array_that_is_not_split_counts_once():
    # Fewer than 1,024 numbers stay whole where the update is sharded, and are sent in few bits.
    shapes = {"large": (64, 40), "small": (15, 40)}
    g = {name: RNG.normal(size=(4, N, *x)).astype(np.float32) for name, x in shapes.items()}
    linear = lambda params, g: sum((params[name] * g[name].mean(0)).sum() for name in shapes)
    opt = CrossShardOptimizer(optax.sgd(0.5), group_assignment=WORKERS[4])
    options: Any = {"weight_update": "sharded", "outer_reduce_dtype": "int4", "sync_every": 2}
    step = make_train_step(linear, opt, num_shards=N, loss_over="shard", **options)
    state = step.init({name: np.zeros(x, np.float32) for name, x in shapes.items()})
    for t in range(4):
        state, _ = step(state, {name: x[t] for name, x in g.items()})
    for name, end in step.model(state).items():
        held = np.float64(state.opt_state.outer.aggregate.residual[name]).sum(0)
        exact = -0.5 * np.float64(g[name]).mean(1).sum(0)
        assert np.abs(end - exact).max() > 1e-3
        np.testing.assert_allclose(np.float64(end) - held, exact, rtol=0, atol=2e-6)


def test_a_nan_that_a_worker_holds_back_does_not_reach_the_anchor():
    step = step_of(8, sync_every=2, outer_reduce_dtype="int8")
    state = train(step, step.init(PARAMS), range(2))
    outer = state.opt_state.outer
    held = outer.aggregate.residual["w"]
    bad = {"w": jax.device_put(held.at[3, 2].set(np.nan), held.sharding)}
    bad = outer.aggregate.residual | bad
    outer = outer._replace(aggregate=outer.aggregate._replace(residual=bad))
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(outer=outer))
    state = train(step, state, range(2))
    for x in jax.tree.leaves((state.params, state.opt_state.outer)):
        assert np.isfinite(x).all()


# Going on.


@pytest.mark.deep
def test_what_workers_hold_back_goes_to_others():
    step = step_of(4, outer_reduce_dtype="int4", sync_every=2, weight_update="sharded")
    state = train(step, step.init(PARAMS), range(2))
    exact = step_of(4, sync_every=2)
    both = exact.model(train(exact, exact.init(PARAMS), range(2)))["w"]
    lacks = both - np.float64(step.model(state)["w"])
    for other_workers in (2, 8):
        other = step_of(other_workers, outer_reduce_dtype="int4", sync_every=2)
        moved = other.reshard(step.unshard(state))
        held = np.float64(moved.opt_state.outer.aggregate.residual["w"]).sum(0)
        np.testing.assert_allclose(-held, lacks, rtol=0, atol=1e-6)
    assert np.abs(lacks).max() > 1e-4


@pytest.mark.deep
@pytest.mark.parametrize("pieces", [False, True])
def test_a_run_goes_on_in_the_middle_of_a_round(tmp_path: Path, pieces: bool):
    options = {**OUTER, "outer_reduce_dtype": "int8", "sync_streaming": pieces}
    step = step_of(4, optax.adam(0.01), **options)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(train(step, step.init(PARAMS), range(6)))
    again = step_of(4, optax.adam(0.01), **options)
    with Checkpoints(tmp_path, again) as checkpoints:
        state, _ = checkpoints.restore_latest(again.init(PARAMS))
    state = train(again, state, range(6, STEPS))
    want = train(step, step.init(PARAMS))
    assert_same(jax.device_get(state.params), jax.device_get(want.params))
    assert_same(jax.device_get(state.opt_state), jax.device_get(want.opt_state))


def test_other_workers_go_on():
    """From some workers of so many shards to others: at a synchronisation, and between two."""
    before, after = (2, 8), (4, 4)

    def made(workers: int, shards: int) -> Any:
        groups = np.arange(shards).reshape(workers, -1).tolist()
        opt = CrossShardOptimizer(optax.adam(0.01), group_assignment=groups)
        return make_train_step(loss_fn, opt, num_shards=shards, sync_every=4, **OUTER)

    one, other = made(*before), made(*after)
    for steps in (8, 6):
        state = train(one, one.init(PARAMS), range(steps))
        mean = {name: np.float64(x).mean(0) for name, x in jax.device_get(state.params).items()}
        anchor = one.model(state)
        moved = other.reshard(one.unshard(state))
        assert_same(other.model(moved), anchor)
        for name, x in jax.device_get(moved.params).items():
            assert x.shape[0] == after[1]
            np.testing.assert_allclose(x, np.broadcast_to(mean[name], x.shape), atol=1e-7, rtol=0)
        outer = jax.device_get(moved.opt_state.outer.inner_state)
        assert_same(outer, jax.device_get(state.opt_state.outer.inner_state))
        assert moved.opt_state.outer.count == steps
        inner = other.unshard(moved).opt_state.inner_state[0].mu["w"]
        assert not np.ptp(np.asarray(inner), axis=0).any()
        moved = train(other, moved, range(steps, STEPS - 1))
        # The shards of a worker are one.
        of_each = np.asarray(moved.params["w"]).reshape(after[0], -1, 64, 40)
        assert not np.ptp(of_each, axis=1).any()


def test_groups_become_workers_that_begin_at_their_mean():
    opt = CrossShardOptimizer(optax.sgd(0.3), group_assignment=WORKERS[4])
    groups, step = make_train_step(loss_fn, opt, num_shards=N), step_of(4, sync_every=1, **OUTER)
    state = train(groups, groups.init(PARAMS), range(2))
    with pytest.warns(CheckpointWarning, match="outer is new"):
        moved = step.reshard(groups.unshard(state))
    own = jax.device_get(state.params)
    assert_same(jax.device_get(moved.params), own)
    mean = {name: np.float64(x).mean(0) for name, x in own.items()}
    assert all(np.ptp(x, axis=0).any() for x in own.values())
    assert_close(step.model(moved), mean, 1e-6)
    # As Optax alone goes on from there.
    rows = [tuple(np.split(each[2], 4)[worker] for each in (X, Y)) for worker in range(4)]
    after = []
    for worker, batch in enumerate(rows):
        params = {name: x[2 * worker] for name, x in own.items()}
        gradients = jax.grad(loss_fn)(params, batch)
        after.append({name: params[name] - 0.3 * gradients[name] for name in params})
    outer = optax.sgd(**NESTEROV)
    moves = {name: mean[name] - np.mean([each[name] for each in after], 0) for name in mean}
    updates, _ = outer.update(moves, outer.init(mean))
    assert_close(step.model(train(step, moved, [2])), optax.apply_updates(mean, updates), 1e-5)


CUT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "in other pieces": ({}, {"sync_every": 6}, "4 pieces in it, and 6 pieces here"),
    "no longer": ({}, {"sync_streaming": False}, "4 pieces in it, and off here"),
    "from now on": ({"sync_streaming": False}, {}, "off in it, and 4 pieces here"),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_in_another_way_is_refused(tmp_path: Path, name: str):
    before, after, text = CUT[name]
    one, other = streaming(4, **OUTER | before), streaming(4, **OUTER | after)
    state = one.init(PARAMS)
    with pytest.raises(ArgumentError, match="cuts them differently"):
        other.reshard(one.unshard(state))
    with pytest.raises(ArgumentError, match="cuts them differently"):
        other(state, (X[0], Y[0]))
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(state)
    with (
        Checkpoints(tmp_path, other) as checkpoints,
        pytest.raises(CheckpointMismatchError, match=f"sync_streaming is {text}"),
    ):
        checkpoints.restore_latest(other.init(PARAMS))


def test_what_is_held_back_inside_a_worker_stays_with_it():
    step = step_of(4, reduce_dtype="int8")
    state = train(step, step.init(PARAMS), range(3))
    held = state.opt_state.aggregate.residual["w"]
    same = step.reshard(step.unshard(state)).opt_state.aggregate.residual["w"]
    np.testing.assert_array_equal(same, held)
    moved = step_of(2, reduce_dtype="int8").reshard(step.unshard(state))
    assert np.asarray(held).any()
    assert not np.asarray(moved.opt_state.aggregate.residual["w"]).any()


@pytest.mark.deep
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
    anchor = step.model(train(step, step.init(PARAMS), range(4)))
    assert np.abs(np.asarray(state.params["w"])[0] - anchor["w"]).max() > 1e-3
    want = ((X[0] @ anchor["w"] + anchor["b"] - Y[0]) ** 2).mean()
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.deep
def test_parameters_may_be_split_over_other_axes():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    to = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    split = {
        "w": jax.device_put(PARAMS["w"], to(None, "model")),
        "b": jax.device_put(PARAMS["b"], to("model")),
    }
    found = []
    for params, where in (
        (PARAMS, {"num_shards": 4}),
        (split, {"mesh": mesh, "axis_name": "data"}),
    ):
        options: Any = {"sync_every": 3, "sync_streaming": True, **OUTER, **where}
        step = make_train_step(loss_fn, optax.adam(0.01), **options)
        found.append(step.model(train(step, step.init(params))))
    assert_close(*found)


def test_a_copy_of_the_count_in_which_a_bit_flips_follows_the_others():
    step = streaming(4, **OUTER)
    state = train(step, step.init(PARAMS))
    outer = state.opt_state.outer
    copies = [shard.data for shard in outer.count.addressable_shards]
    copies[3] = jax.device_put(copies[3] + 2**20, copies[3].device)
    flipped = jax.make_array_from_single_device_arrays((), outer.count.sharding, copies)
    flipped = outer._replace(count=flipped)
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(outer=flipped))
    state = train(step, state, [0])
    after = {int(shard.data) for shard in state.opt_state.outer.count.addressable_shards}
    assert after == {STEPS + 1}


SAID = {
    False: "every 4 steps the mean over the workers in {}, and the outer update",
    True: "every step the next 1/4 of the mean over the workers in {}, beside the step, and its "
    "outer update",
}


@pytest.mark.parametrize("pieces", [False, True])
def test_it_says_what_it_does(pieces: bool):
    step = step_of(4, **OUTER, outer_reduce_dtype="int8", sync_streaming=pieces)
    step.init(PARAMS)
    text = SAID[pieces].format("int8 with error feedback")
    assert step.describe().splitlines()[0].endswith(f"→ {text}")


NOT_ELEMENTWISE = {
    "a norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
    "a norm of each": optax.lamb(0.1),
    "matrices": optax.contrib.muon(0.1),
    "a shape": optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda x: x.size > 1000, params)),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_an_outer_optimizer_that_looks_at_more_than_a_piece_is_refused(name: str):
    step = streaming(8, outer_optimizer=NOT_ELEMENTWISE[name])
    # Numbers alone have a norm, too.
    numbers = [{"a": np.ones(shape, np.float32)} for shape in ((), 1)]
    for params in (PARAMS, *numbers) if name == "a norm" else (PARAMS,):
        with pytest.raises(ArgumentError, match="outer_optimizer is not elementwise: "):
            step.init(params)


WRAPPED = CrossShardOptimizer(optax.sgd(1.0))
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sync_every": 0}, ArgumentError, "sync_every must be at least 1"),
    ({"sync_every": "often"}, ArgumentTypeError, "It counts steps"),
    ({"sync_every": None} | OUTER, ArgumentError, "Say for how many: sync_every=20"),
    ({"sync_every": None} | STREAMING, ArgumentError, "Say for how many: sync_every=20"),
    ({"sync_every": None, "outer_reduce_dtype": "int8"}, ArgumentError, "dtype is for workers"),
    ({"outer_optimizer": WRAPPED}, ArgumentTypeError, "without CrossShardOptimizer"),
    ({"outer_optimizer": optax.sgd}, ArgumentTypeError, "outer_optimizer must be"),
    ({"outer_reduce_dtype": "int3"}, ArgumentError, "outer_reduce_dtype must be"),
    ({"outer_reduce_dtype": {"a": "int8"}}, ArgumentError, "one for all axes"),
    ({"sync_streaming": "yes"}, ArgumentTypeError, "must be True or False"),
]


@pytest.mark.parametrize(("options", "kind", "text"), REFUSED)
def test_refusals(options: dict[str, Any], kind: type[Exception], text: str):
    with pytest.raises(kind, match=text):
        step_of(8, **options)


@pytest.mark.parametrize("option", ["sync_every", "sync_streaming"])
def test_an_optimizer_does_not_take_it(option: str):
    with pytest.raises(ArgumentTypeError, match=rf"make_train_step\(\.\.\., {option}=\.\.\.\)"):
        CrossShardOptimizer(optax.sgd(0.1), **{option: 4})
