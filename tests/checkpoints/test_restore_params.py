"""The parameters of a checkpoint alone, trained or frozen, of workers, and what follows them."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.errors import CheckpointMismatchError
from tests.step.common import assert_close

RNG = np.random.default_rng(0)
X = np.float32(RNG.normal(size=(16, 64)))
# The body is large enough to be sharded, also where it is frozen.
SAVED = {
    "body": np.float32(RNG.normal(size=(64, 512)) / 8),
    "head": np.float32(RNG.normal(size=(512, 8)) / 8),
    "order": np.arange(64)[::-1].copy(),
}
INIT = {**jax.tree.map(np.zeros_like, SAVED), "order": np.arange(64)}


def in_16_bits(params: Any) -> Any:
    return {name: x if name == "order" else x.astype(jnp.bfloat16) for name, x in params.items()}


SAVED_16 = in_16_bits(SAVED)
OUTER = (("sync_every", 1), ("outer_optimizer", optax.sgd(0.7, momentum=0.9, nesterov=True)))
RATE = 0.1


def loss_fn(params: Any, x: Any) -> jax.Array:
    hidden = jnp.tanh(x[:, params["order"]] @ params["body"].astype(jnp.float32))
    return ((hidden @ params["head"].astype(jnp.float32) - 1) ** 2).mean()


def head(path: Any, _: Any) -> bool:
    return bool(path[0].key == "head")


@functools.cache
def step_with(shards: int = 4, **options: Any) -> Any:
    return make_train_step(loss_fn, optax.sgd(RATE), num_shards=shards, donate=False, **options)


def with_outer() -> Any:
    # A cache does not take a dict.
    return step_with(**dict(OUTER))


def saved(folder: Path, step: Any, state: Any) -> Path:
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.save(state)
    return folder


def restored(folder: Path, step: Any, init: Any = None) -> Any:
    return Checkpoints(folder, step).restore_params(step.init(INIT if init is None else init))


def check_is(model: Any, expected: Any) -> None:
    for name, x in expected.items():
        np.testing.assert_array_equal(model[name], x, err_msg=name)


def after_sgd(params: Any, rate: float = RATE) -> Any:
    """What one step of plain SGD on one device makes of the floating parameters."""
    floating = {name: x for name, x in params.items() if name != "order"}
    gradients = jax.grad(lambda own: loss_fn({**params, **own}, X))(floating)
    return {name: x - rate * gradients[name] for name, x in floating.items()}


# What is trained in one run may be frozen in the other.


@pytest.mark.parametrize("params", ["replicated", "sharded"])
def test_all_parameters_come_back_trained_or_frozen(params: str, tmp_path: Path):
    whole, tuned = step_with(), step_with(wrt=head, params=params)
    for step in (whole, tuned):
        folder = saved(tmp_path / str(step is tuned), step, step.init(SAVED))
        for other in (whole, tuned):
            check_is(other.model(restored(folder, other)), SAVED)
    state = restored(folder, tuned)
    like = tuned.abstract_init(INIT)
    for x, own in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype) == (own.shape, own.dtype)
        assert x.sharding.is_equivalent_to(own.sharding, x.ndim)
    # It trains the head alone, as one device does.
    after, metrics = tuned(state, X)
    np.testing.assert_allclose(metrics["loss"], loss_fn(SAVED, X), rtol=1e-5)
    check_is(tuned.model(after), {"body": SAVED["body"]})
    assert_close(tuned.model(after)["head"], after_sgd(SAVED)["head"])


class Net(nnx.Module):
    def __init__(self, seed: int):
        self.body = nnx.Linear(64, 8, rngs=nnx.Rngs(seed))
        self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(seed + 1))

    def __call__(self, x: Any) -> jax.Array:
        return self.head(jnp.tanh(self.body(x)))


def test_all_parameters_of_a_module_come_back(tmp_path: Path):
    loss = lambda model, x: ((model(x) - 1) ** 2).mean()
    of_head = nnx.All(nnx.Param, nnx.PathContains("head"))
    whole, tuned = (make_train_step(loss, optax.sgd(0.1), wrt=wrt) for wrt in (None, of_head))
    state = restored(saved(tmp_path, whole, whole.init(Net(0))), tuned, Net(5))
    for x, own in zip(
        *(jax.tree.leaves(nnx.state(model)) for model in (tuned.model(state), Net(0))), strict=True
    ):
        np.testing.assert_array_equal(x, own)


def test_what_is_not_there_is_named_and_so_is_another_wrt(tmp_path: Path):
    whole, tuned = step_with(), step_with(wrt=head)
    part = {name: SAVED[name] for name in ("head", "order")}
    loss = lambda params, x: (params["head"] ** 2).mean() + x.mean() * params["order"].sum()
    small = make_train_step(loss, optax.sgd(RATE), num_shards=4)
    saved(tmp_path / "part", small, small.init(part))
    for step, place in ((whole, "params"), (tuned, "frozen")):
        with pytest.raises(CheckpointMismatchError, match=rf"it has no \.{place}\['body'\]\. "):
            restored(tmp_path / "part", step)
    for was, now, says in (
        (whole, tuned, r"params\['body'\] is trained in it, and frozen here"),
        (tuned, whole, r"params\['body'\] is frozen in it, and trained here"),
    ):
        folder = saved(tmp_path / says[-12:], was, was.init(SAVED))
        match = (
            rf"not of this step: wrt= differs, {says}\. .*restore_params\(state\), or step\.init"
        )
        with pytest.raises(CheckpointMismatchError, match=match):
            Checkpoints(folder, now).restore_latest(now.abstract_init(INIT))


# What is derived from the parameters, and workers.


@pytest.mark.parametrize("streaming", [False, True])
def test_workers_begin_at_the_parameters_of_a_plain_run(streaming: bool, tmp_path: Path):
    plain, workers = step_with(), step_with(**dict(OUTER), sync_streaming=streaming)
    state = restored(saved(tmp_path, plain, plain.init(SAVED)), workers)
    check_is(workers.model(state), SAVED)
    # One step of each worker, and their mean is that of one device.
    after, _ = workers(state, X)
    update = lambda now, before: before + 0.7 * 1.9 * (now - before)
    floating = {name: SAVED[name] for name in ("body", "head")}
    if streaming:
        # The pseudogradient is that of the parameters before the step, which are the anchor's.
        assert_close(workers.model(after)["head"], SAVED["head"])
    else:
        expected = jax.tree.map(update, after_sgd(SAVED), floating)
        assert_close({name: workers.model(after)[name] for name in expected}, expected)


def test_workers_leave_the_parameters_of_their_last_synchronisation(tmp_path: Path):
    workers = step_with(sync_every=3)
    # They keep these with more bits.
    state, _ = workers(workers.init(SAVED_16), X)
    folder = saved(tmp_path, workers, state)
    # Between two synchronisations the model is the one before.
    for step in (step_with(), step_with(2), workers, with_outer()):
        found = restored(folder, step, in_16_bits(INIT))
        check_is(step.model(found), SAVED_16)
        for shard in range(2):
            check_is(step.model(found, shard), SAVED_16)


def test_the_average_and_the_masters_begin_at_the_parameters(tmp_path: Path):
    plain = step_with()
    kept = step_with(ema=0.9, master_dtype="float32", weight_update="sharded")
    state, _ = kept(kept.init(in_16_bits(INIT)), X)
    folder = saved(tmp_path, plain, plain.init(SAVED_16))
    state = Checkpoints(folder, kept).restore_params(state)
    wide = {name: np.float32(SAVED_16[name]) for name in ("body", "head")}
    check_is(kept.model(state), SAVED_16)
    check_is(kept.model(state, ema=True), SAVED_16)
    check_is(kept.unshard(state).opt_state.inner_state.masters, wide)
    after = kept.unshard(kept(state, X)[0]).opt_state.inner_state.inner_state.ema
    now = after_sgd({**SAVED, **wide})
    for name, x in wide.items():
        assert_close(after[name], 0.9 * x + 0.1 * now[name], 1e-4)


def test_groups_have_parameters_of_their_own(tmp_path: Path):
    groups = CrossShardOptimizer(optax.sgd(RATE), group_assignment=[[0, 1], [2, 3]])
    grouped = make_train_step(loss_fn, groups, num_shards=4, donate=False, ema=0.9)
    plain = step_with()
    # Each group begins at the parameters of a plain run.
    state = restored(saved(tmp_path / "plain", plain, plain.init(SAVED)), grouped)
    for shard in (0, 3):
        check_is(grouped.model(state, shard), SAVED)
    state, _ = grouped(state, X)
    folder = saved(tmp_path / "groups", grouped, state)
    found = restored(folder, grouped)
    for shard in (0, 3):
        own = grouped.model(state, shard)
        check_is(grouped.model(found, shard), own)
        average = found.opt_state.inner_state.ema
        check_is(jax.tree.map(lambda x, at=shard: x[at], average), {"head": own["head"]})
    match = (
        r"groups \[\[0, 1\], \[2, 3\]\] have parameters of their own\. .*model\(state, shard=0\)"
    )
    for step in (plain, with_outer()):
        with pytest.raises(CheckpointMismatchError, match=match):
            restored(folder, step)


def test_a_restore_tells_that_shards_are_workers(tmp_path: Path):
    plain, workers = step_with(), step_with(sync_every=3)
    for was, now, says in (
        (
            plain,
            workers,
            r"its shards train together in it, and are workers that synchronise rarely here",
        ),
        (
            workers,
            plain,
            r"its shards are workers that synchronise rarely in it, and train together here",
        ),
    ):
        folder = saved(tmp_path / says[:18], was, was.init(SAVED))
        match = rf"not of this step: {says} \(.*sync_every is .*restore_params\(state\), or step.*"
        with pytest.raises(CheckpointMismatchError, match=match):
            Checkpoints(folder, now).restore_latest(now.abstract_init(INIT))
