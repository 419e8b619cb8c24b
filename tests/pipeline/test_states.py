"""States of all stages at once: taken to other shards and back; and options that are off."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, DynamicLossScale, make_train_step
from crossshard.errors import ArgumentError, CheckpointWarning
from tests.quick import deep
from tests.step.common import assert_same

N = 8
RNG = np.random.default_rng(0)
W = {
    "kernel": RNG.normal(size=(32, 40)).astype(np.float32),
    "bias": RNG.normal(size=40).astype(np.float32),
}
# Every shard has the same rows, so that their number is of no matter.
ROWS = RNG.normal(size=(2, 32)).astype(np.float32)
EVERYTHING: dict[str, Any] = {
    "metrics": ("grad_norm", "local_grad_norm", "update_norm", "param_norm", "noise_scale"),
    "reduce_dtype": "bfloat16",
    "loss_scale": DynamicLossScale(initial=4.0, growth_interval=2),
    "master_dtype": "float32",
    "ema": 0.9,
}
inner = lambda: optax.sgd(0.1, momentum=0.9)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    kernel, bias = (params[key].astype(jnp.float32) for key in ("kernel", "bias"))
    return ((batch["x"] @ kernel + bias) ** 2).mean()


def batch_of(shards: int) -> dict[str, np.ndarray]:
    return {"x": np.tile(ROWS, (shards, 1)), "n": np.ones(2 * shards, np.float32)}


def step_of(shards: int, weight_update: str, groups: Any = None) -> Any:
    opt = CrossShardOptimizer(inner(), group_assignment=groups, preprocess=optax.trace(0.5))
    return make_train_step(
        loss_fn,
        opt,
        num_shards=shards,
        weight_update=weight_update,
        weight=lambda batch: batch["n"].sum(),
        loss_over="shard",
        accumulate_steps=2,
        **EVERYTHING,
    )


def half() -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), W)


@pytest.mark.parametrize("weight_update", ["replicated", deep("sharded")])
def test_a_state_goes_from_eight_shards_to_four_and_on(weight_update: str):
    eight, four = step_of(8, weight_update), step_of(4, weight_update)
    state = eight.init(half())
    for _ in range(2):
        state, _ = eight(state, batch_of(8))
    saved = jax.tree.map(np.asarray, eight.unshard(state))
    assert saved.opt_state.inner_state.masters["kernel"].shape == (32, 40)
    there = four.reshard(saved)
    assert there.opt_state.preprocess.trace["bias"].shape == (4, 40)
    assert_same(jax.tree.map(np.asarray, four.unshard(there)).opt_state[3:], saved.opt_state[3:])
    for _ in range(2):
        state, here = eight(state, batch_of(8))
        there, moved = four(there, batch_of(4))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(there.params), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7)
    masters = [
        optax.tree.get(step.unshard(each).opt_state, "masters")
        for step, each in ((eight, state), (four, there))
    ]
    for key in W:
        np.testing.assert_allclose(masters[0][key], masters[1][key], rtol=0, atol=1e-4)
    assert float(here["loss_scale"]) == float(moved["loss_scale"]) == 8
    np.testing.assert_allclose(here["grad_norm"], moved["grad_norm"], rtol=1e-2)


def test_an_unsharded_state_of_groups_comes_back():
    step = step_of(N, "sharded", [[0, 2, 4, 6], [1, 3, 5, 7]])
    state, _ = step(step.init(half()), batch_of(N))
    saved = step.unshard(state)
    assert_same(step.reshard(saved), state)


PAIRS, OTHERS, ALONE = [[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0], [1], [2], [3]]


def of_four(groups: Any, inner: Any, **options: Any) -> tuple[Any, Any]:
    """A step of four shards, and its whole state after a step on rows that differ."""
    opt = CrossShardOptimizer(inner, group_assignment=groups)
    loss = lambda w, x: ((x @ w - 1) ** 2).mean()
    step = make_train_step(loss, opt, num_shards=4, **options)
    state, _ = step(step.init(np.ones(3, np.float32)), ROWS_OF_FOUR)
    return step, step.unshard(state)


ROWS_OF_FOUR = RNG.normal(size=(8, 3)).astype(np.float32) + np.arange(8, dtype=np.float32)[:, None]


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.sgd(0.1, 0.9)], ids=["sgd", "momentum"])
def test_a_group_takes_no_shards_that_differ(inner: Any):
    (pairs, of_pairs), (others, _), (alone, of_alone) = (
        of_four(groups, inner) for groups in (PAIRS, OTHERS, ALONE)
    )
    _, in_mid_round = of_four(ALONE, inner, sync_every=4)
    for step, state, named in (
        (others, of_pairs, [0, 3]),
        (pairs, of_alone, [0, 1]),
    ):
        with pytest.raises(ArgumentError, match=rf"Shards \{named}.*shard=0"):
            step.reshard(state)
    with pytest.warns(CheckpointWarning), pytest.raises(ArgumentError, match=r"Shards \[0, 1\]"):
        pairs.reshard(in_mid_round)
    one_apart = jax.tree.map(lambda x: x.at[3].add(1), of_pairs.opt_state)
    if jax.tree.leaves(one_apart):
        with pytest.raises(ArgumentError, match=r"Shards \[2, 3\]"):
            pairs.reshard(dataclasses.replace(of_pairs, opt_state=one_apart))
    # The shards of finer groups, and of a group that has gone wrong, are alike.
    wrong = dataclasses.replace(of_pairs, params=of_pairs.params.at[:2].set(np.nan))
    for step, state in ((alone, of_pairs), (pairs, of_pairs), (pairs, wrong)):
        np.testing.assert_array_equal(step.reshard(state).params, state.params)
    assert np.ptp(np.asarray(of_pairs.params), axis=0).all()
    assert jax.eval_shape(pairs.reshard, of_alone).params.shape == (4, 3)


def test_a_state_may_hold_numbers_of_pythons():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: -state * g, updates), state / 2

    inner = optax.GradientTransformation(lambda params: 0.5, update)
    step = make_train_step(loss_fn, inner, num_shards=N)
    state, _ = step(step.init(W), batch_of(N))
    assert float(state.opt_state.inner_state) == 0.25


# What is off.

DEFAULTS: dict[str, Any] = {
    "metrics": (),
    "reduce_dtype": None,
    "loss_scale": None,
    "master_dtype": None,
    "ema": None,
    "accumulate_steps": 1,
}


@pytest.mark.parametrize("name", ["sgd", deep("lamb")])
def test_a_step_with_every_option_off_is_the_same_program(name: str):
    def text(**options: Any) -> str:
        step = make_train_step(
            loss_fn,
            getattr(optax, name)(0.1),
            num_shards=N,
            weight_update="sharded",
            **options,
        )
        return step.lower(step.abstract_init(W), batch_of(N)).as_text()

    plain = text()
    assert text(**DEFAULTS, weight=None, has_aux=False) == plain
    assert text(ema=0.5) != plain
