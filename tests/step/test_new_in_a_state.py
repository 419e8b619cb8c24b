"""What somebody puts into a state between two steps is compared, and only that."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import Mean, make_train_step
from crossshard.model.state import FlatState, put_into
from crossshard.step import program
from crossshard.step.train_step import placer_of

ROWS = np.linspace(0, 3, 16, dtype=np.float32)
RATE = "opt_state.inner_state.hyperparams['learning_rate']"


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((params["w"] - batch) ** 2)


@pytest.fixture(scope="module")
def step() -> Any:
    opt = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    return make_train_step(loss_fn, opt, num_shards=2, donate=False)


@pytest.fixture
def state(step: Any) -> Any:
    return step(step.init({"w": jnp.float32(0)}), ROWS)[0]


def set_rate(state: Any) -> Any:
    rates = state.opt_state.inner_state.hyperparams
    rates["learning_rate"] = rates["learning_rate"] * 0.5
    return state


def read(state: Any) -> Any:
    assert state.params["w"] is not None
    return state


# What is done to a state that a step has returned, and what is new in it then.
DONE: dict[str, tuple[Callable[[Any], Any], list[str] | None]] = {
    "nothing": (lambda state: state, []),
    "it is read": (read, []),
    "a rate is set": (set_rate, [RATE]),
    "a parameter is set": (lambda s: s.params.update(w=jnp.float32(7)) or s, ["params['w']"]),
    # In one process all arrays are of this process alone.
    "it is another object": (lambda s: dataclasses.replace(s, frozen=s.frozen), None),
}


@pytest.mark.parametrize("what", DONE)
def test_what_a_step_has_returned_is_not_new(state: Any, what: str):
    do, names = DONE[what]
    state = do(state)
    found = put_into(state, FlatState.of(state))
    assert sorted(found) == sorted(names if names is not None else put_into_all(state))


def put_into_all(state: Any) -> list[str]:
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [name.removeprefix(".") for name in names]


def test_a_step_in_several_processes_compares_what_is_new(monkeypatch: pytest.MonkeyPatch):
    told: list[Any] = []
    monkeypatch.setattr(program, "processes_of", lambda _: (0, 1))
    monkeypatch.setattr(program, "check_agreement", lambda *given: told.append(given[1]()))
    opt = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    step = make_train_step(loss_fn, opt, num_shards=2)
    state, _ = step(step.init({"w": jnp.float32(0)}), ROWS)
    told.clear()
    state, _ = step(read(state), ROWS)
    assert not told
    sums = []
    for rate in (0.1, 0.2, 0.2):
        state.opt_state.inner_state.hyperparams["learning_rate"] = jnp.float32(rate)
        state, _ = step(state, ROWS)
        sums += [each[f"state.{RATE}"] for each in told]
        assert len(told) == 1
        told.clear()
    assert sums[0] != sums[1] == sums[2]


def mean(w: Any, batch: jax.Array) -> Mean:
    return Mean(((w - batch) ** 2).sum(), batch.size)


def mean_and_state(w: Any, state: Any, batch: jax.Array) -> Any:
    return mean(w, batch), batch.mean() + 0 * state


# Losses, and whether processes may pass unequal rows of them.
COUNTS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "a mean of rows": (lambda w, x: ((w - x) ** 2).mean(), {}, False),
    "a Mean": (mean, {}, True),
    "a Mean over the batch, whose size is a constant": (mean, {"loss_over": "batch"}, False),
    "a Mean beside an average over shards": (
        lambda w, x: (mean(w, x), x.mean()),
        {"has_aux": True, "aux_reduction": "mean"},
        False,
    ),
    "a Mean beside what each shard returns": (
        lambda w, x: (mean(w, x), x.mean()),
        {"has_aux": True},
        True,
    ),
    "a Mean beside an average of states": (mean_and_state, {"model_state": "mean"}, False),
}


@pytest.mark.parametrize("what", COUNTS)
def test_processes_may_pass_any_rows_of_a_mean_that_counts_them(what: str):
    loss, options, counts = COUNTS[what]
    step = make_train_step(loss, optax.sgd(0.5), num_shards=2, **options)
    given = {"model_state": jnp.float32(0)} if "model_state" in options else {}
    step(step.init(jnp.float32(0), **given), ROWS)
    assert placer_of(step).takes_any_rows == counts
    assert placer_of(step).rows_of(ROWS) == ("float32[any]" if counts else "float32[16]")
