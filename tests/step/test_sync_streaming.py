"""Workers that synchronise a piece in every step: against a model in numpy, on other workers."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointMismatchError
from crossshard.pipeline import Quantized
from tests.quick import deep_but
from tests.step.common import assert_same
from tests.step.workers import (
    INNER,
    NESTEROV,
    PARAMS,
    RNG,
    SIZE,
    STEPS,
    WORKERS,
    N,
    Sgd,
    X,
    Y,
    loss_fn,
    on_a_line,
    sent_by,
    step_of,
    train,
    train_alone,
)


def streaming(workers: int, inner: Any = None, **options: Any) -> Any:
    return step_of(workers, inner, **{"sync_streaming": True} | options)


# The same in numpy and float64.


def piece(name: str, at: int, every: int) -> Any:
    """Which numbers of a parameter are in a piece: rows, or fewer where there are few of them."""
    x = PARAMS[name]
    units = len(x) if x.ndim > 1 and len(x) >= 16 * every else x.size
    is_in = np.zeros(units, bool)
    is_in[at * units // every : (at + 1) * units // every] = True
    return np.repeat(is_in, x.size // units).reshape(x.shape)


def in_numpy(workers: int, every: int, inner: Any, outer: Any, steps: int = STEPS) -> Any:
    """The anchor, and the parameters of each worker."""
    anchor = {name: np.float64(x) for name, x in PARAMS.items()}
    each, optimizers = [dict(anchor) for _ in range(workers)], [inner() for _ in range(workers)]
    outers = [outer() for _ in range(every)]
    for t in range(steps):
        before = [dict(params) for params in each]
        train_alone(each, optimizers, t)
        # Of what was there before the step.
        moved = {n: np.mean([x - params[n] for params in before], 0) for n, x in anchor.items()}
        of_piece = {n: piece(n, t % every, every) for n in anchor}
        updates = outers[t % every]({n: np.where(of_piece[n], x, 0) for n, x in moved.items()})
        for n, update in updates.items():
            anchor[n] = anchor[n] + update
            for params, was in zip(each, before, strict=True):
                params[n] = np.where(of_piece[n], anchor[n] + params[n] - was[n], params[n])
    return anchor, each


# Pieces of rows, of rows of which some are in two windows, and of numbers.
@pytest.mark.parametrize("every", deep_but((3, 7), [1, 3, 4, 7]))
@pytest.mark.parametrize("update", deep_but(("sharded",), ["replicated", "sharded"]))
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("inner", deep_but(("sgd",), list(INNER)))
def test_it_is_that_of_numpy(inner: str, workers: int, update: str, every: int):
    ours, theirs = INNER[inner]
    outer = optax.sgd(**NESTEROV)
    options: Any = {"outer_optimizer": outer, "weight_update": update, "sync_every": every}
    step = streaming(workers, ours(), **options)
    state = train(step, step.init(PARAMS))
    anchor, each = in_numpy(workers, every, theirs, lambda: Sgd(**NESTEROV))
    atol = 1e-6 if inner == "sgd" else 1e-5
    for name, want in anchor.items():
        np.testing.assert_allclose(step.model(state)[name], want, rtol=0, atol=atol)
        for shard in range(N) if workers > 1 else ():
            got = step.model(state, shard=shard)[name]
            own = each[shard * workers // N][name]
            np.testing.assert_allclose(got, own, rtol=0, atol=atol)


# Identities.


@pytest.mark.parametrize("inner", INNER)
def test_one_worker_that_takes_the_mean_is_the_plain_run(inner: str):
    plain = make_train_step(loss_fn, INNER[inner][0](), num_shards=N)
    step = streaming(1, INNER[inner][0]())
    want = train(plain, plain.init(PARAMS)).params
    assert_same(train(step, step.init(PARAMS)).params, want)


def test_a_rate_of_zero_leaves_the_anchor():
    step = streaming(4, outer_optimizer=optax.sgd(0.0))
    assert_same(step.model(train(step, step.init(PARAMS))), PARAMS)


@pytest.mark.parametrize("every", deep_but((10,), [1, 3, 10, 500]))
def test_any_shape_is_cut_into_pieces_that_lose_nothing(every: int):
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
    step = make_train_step(loss, optax.sgd(0.01), sync_every=every, sync_streaming=True, **options)
    state, want = step.init(params), plain.init(params)
    for x in same:
        (state, _), (want, _) = step(state, x), plain(want, x)
    for name, x in jax.device_get(want.params).items():
        for own in np.asarray(state.params[name]):
            np.testing.assert_allclose(own, x, rtol=0, atol=1e-6)


def test_the_sum_waits_for_no_gradient():
    # What is synchronised in a step depends on nothing of its batch.
    step = streaming(4, outer_optimizer=optax.sgd(**NESTEROV))
    one, other = (train(step, step.init(PARAMS), range(6)) for _ in range(2))
    one, _ = step(one, (X[6], Y[6]))
    other, _ = step(other, (100 * X[7], Y[7]))
    assert_same(step.model(one), step.model(other))
    assert not np.array_equal(one.params["w"], other.params["w"])


# What is sent.


@pytest.mark.parametrize("workers", deep_but((8,), [8, 4, 2]))
def test_every_step_sends_its_part(workers: int):
    step = streaming(workers, weight_update="replicated", sync_every=16)
    always, seldom = sent_by(step)
    size = N // workers
    inside, between = 2 * (size - 1) / size * SIZE, 2 * (workers - 1) / workers * SIZE
    assert always == pytest.approx(inside + between / 16, rel=0.01, abs=100)
    assert seldom == 0


def test_each_shard_of_a_worker_sends_a_slice():
    always, seldom = sent_by(streaming(4, optax.adam(1e-3), sync_every=16, weight_update="sharded"))
    inside, between = 2 * 1 / 2 * SIZE, 2 * 3 / 4 * 1 / 2 * SIZE
    assert always == pytest.approx(inside + (between + SIZE / 2) / 16, rel=0.01)
    assert seldom == 0


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("workers", deep_but((4,), [8, 4, 2]))
@pytest.mark.parametrize(
    "wire", deep_but(("int4",), ["int8", "int4", Quantized("int4", "stochastic")]), ids=str
)
def test_few_bits_lose_nothing(workers: int, wire: Any, update: str):
    options: Any = {"sync_every": 3, "outer_reduce_dtype": wire, "weight_update": update}
    _, state, exact = on_a_line(workers, 97, 11, sync_streaming=True, **options)
    ends = np.float64(state.params).mean(0)
    # The windows have 33 rows, and two of the pieces 32.
    first, second, third = np.float64(state.opt_state.outer.aggregate.residual).sum(0)
    held = np.concatenate([first[:32], second[:32], third])
    assert np.abs(ends - exact).max() > 1e-3
    np.testing.assert_allclose(ends - held, exact, rtol=0, atol=3e-6)


# Going on.


@pytest.mark.parametrize("way", deep_but(("reshard",), ["reshard", "checkpoints"]))
def test_other_workers_go_on(tmp_path: Path, way: str):
    one, other = (
        streaming(workers, outer_optimizer=optax.sgd(**NESTEROV), outer_reduce_dtype="int8")
        for workers in (4, 2)
    )
    state = train(one, one.init(PARAMS), range(6))
    before = jax.device_get(state.opt_state.outer)
    if way == "reshard":
        moved = other.reshard(one.unshard(state))
    else:
        with Checkpoints(tmp_path, one) as checkpoints:
            checkpoints.save(state)
        with Checkpoints(tmp_path, other) as checkpoints:
            moved, _ = checkpoints.restore_latest(other.init(PARAMS))
    after = jax.device_get(moved.opt_state.outer)
    assert_same(after.anchor, before.anchor)
    assert_same(after.inner_state, before.inner_state)
    for x, was in zip(*map(jax.tree.leaves, (after.aggregate, before.aggregate)), strict=True):
        np.testing.assert_allclose(x.sum(0), was.sum(0), rtol=0, atol=1e-6)
    assert np.isfinite(train(other, moved, range(6, STEPS)).params["w"]).all()


OUTER: Any = {"outer_optimizer": optax.sgd(**NESTEROV)}
CUT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "in other pieces": ({}, {"sync_every": 6}, "4 pieces in it, and 6 pieces here"),
    "no longer": ({}, {"sync_streaming": False}, "4 pieces in it, and off here"),
    "from now on": ({"sync_streaming": False}, {}, "off in it, and 4 pieces here"),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_in_another_way_is_refused(tmp_path: Path, name: str):
    before, after, text = CUT[name]
    one, other = streaming(4, **OUTER | before), streaming(4, **OUTER | after)
    state = train(one, one.init(PARAMS), range(2))
    with pytest.raises(ArgumentError, match="cut into other pieces"):
        other.reshard(one.unshard(state))
    with pytest.raises(ArgumentError, match="cut into other pieces"):
        other(state, (X[0], Y[0]))
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(state)
    with (
        Checkpoints(tmp_path, other) as checkpoints,
        pytest.raises(CheckpointMismatchError, match=f"sync_streaming is {text}"),
    ):
        checkpoints.restore_latest(other.init(PARAMS))


def test_without_an_outer_state_it_may_begin_and_end(tmp_path: Path):
    one, other = step_of(4), streaming(4)
    state = train(one, one.init(PARAMS), range(6))
    state = train(other, other.reshard(one.unshard(state)), range(6, 9))
    assert state.opt_state.outer.count == 9
    state = train(one, one.reshard(other.unshard(state)), range(9, STEPS))
    assert_same(np.asarray(state.params["w"][0]), np.asarray(state.params["w"][7]))


# What goes with it.


@pytest.mark.parametrize(
    "options",
    deep_but(
        ({"accumulate_steps": 2},),
        [{"accumulate_steps": 2}, {"nonfinite": "skip"}, {"check_divergence": 1}],
    ),
    ids=str,
)
def test_other_options_change_nothing(options: Any):
    plain, step = (streaming(4, optax.adam(0.01), **OUTER | each) for each in ({}, options))
    got, want = (train(each, each.init(PARAMS)).params for each in (step, plain))
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=1e-6)


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
    for name, x in found[0].items():
        np.testing.assert_allclose(found[1][name], x, rtol=0, atol=1e-6)


def test_parameters_of_sixteen_bits_are_rounded_from_the_anchor():
    halves = {name: jnp.asarray(x, jnp.bfloat16) for name, x in PARAMS.items()}
    step, whole = (streaming(8, optax.sgd(0.3), **OUTER) for _ in range(2))
    state = train(step, step.init(halves))
    want = whole.model(train(whole, whole.init(PARAMS)))
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.opt_state.outer.anchor["w"].dtype == jnp.float32
    for name, x in want.items():
        np.testing.assert_allclose(np.float32(step.model(state)[name]), x, rtol=0, atol=0.01)


def test_it_says_what_it_does_and_verifies():
    step = streaming(4, outer_optimizer=optax.sgd(**NESTEROV), outer_reduce_dtype="int8")
    step.init(PARAMS)
    text = step.describe().splitlines()[0]
    part = "every step the next 1/4 of the mean over the workers in int8 with error feedback"
    assert text.endswith(f"→ {part}, beside the step, and its outer update")
    assert crossshard.verify(step, PARAMS, (X[0], Y[0])).ok


def of_large(params: Any) -> Any:
    return jax.tree.map(lambda x: x.size > 1000, params)


NOT_ELEMENTWISE = {
    "a norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
    "a norm of each": optax.lamb(0.1),
    "matrices": optax.contrib.muon(0.1),
    "a shape": optax.adamw(0.1, mask=of_large),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_an_outer_optimizer_that_looks_at_more_than_a_piece_is_refused(name: str):
    step = streaming(8, outer_optimizer=NOT_ELEMENTWISE[name])
    with pytest.raises(ArgumentError, match="outer_optimizer is not elementwise: "):
        step.init(PARAMS)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_numbers_alone_have_a_norm_too(shape: tuple[int, ...]):
    numbers = {"a": np.ones(shape, np.float32), "b": np.ones(shape, np.float32)}
    loss = lambda params, x: (params["a"] * params["b"]).sum() * x.mean()
    options: Any = {"sync_every": 4, "sync_streaming": True, "num_shards": N}
    clipped = NOT_ELEMENTWISE["a norm"]
    step = make_train_step(loss, optax.sgd(0.1), outer_optimizer=clipped, **options)
    with pytest.raises(ArgumentError, match="outer_optimizer is not elementwise: "):
        step.init(numbers)


def test_a_mask_by_dimensions_is_that_of_the_parameters():
    # A piece of a small matrix has as many dimensions as the matrix.
    matrices = lambda params: jax.tree.map(lambda x: jnp.ndim(x) > 1, params)
    found = [
        (step := streaming(8, sync_every=7, outer_optimizer=optax.adamw(0.1, mask=mask))).model(
            train(step, step.init(PARAMS))
        )
        for mask in (matrices, {"w": True, "b": False})
    ]
    assert_same(*found)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "alone": ({"sync_every": None}, ArgumentError, "Say for how many: sync_every=20"),
    "a word": ({"sync_streaming": "yes"}, ArgumentTypeError, "must be True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str):
    options, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        streaming(8, **options)


def test_an_optimizer_does_not_take_it():
    with pytest.raises(
        ArgumentTypeError, match=r"make_train_step\(\.\.\., sync_streaming=\.\.\.\)"
    ):
        CrossShardOptimizer(optax.sgd(0.1), sync_streaming=True)
