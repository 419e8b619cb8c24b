"""What a process closes over is compared: in an optimizer's init, and in what is evaluated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import DynamicLossScale, _jax, make_train_step
from crossshard.errors import CheckpointWarning
from tests.two import told_by_two

W = np.float32([1, 2, 3])
ROWS = np.float32([[1, 2, 3], [4, 5, 6]])


def loss_fn(w: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ w - 1) ** 2)


def step_of(opt: Any = None, **options: Any) -> Any:
    return make_train_step(loss_fn, opt or optax.sgd(0.1), **{"num_shards": 1, **options})


def scaled(initial: float) -> Any:
    return step_of(loss_scale=DynamicLossScale(initial=initial))


# Steps that differ in a number, and in nothing that init is passed.
STEPS: dict[str, Callable[[float], Any]] = {
    "rate of plain sgd": lambda x: step_of(optax.inject_hyperparams(optax.sgd)(x)),
    "key": lambda x: step_of(optax.chain(optax.add_noise(0.1, 0.5, key=int(x)), optax.sgd(0.1))),
    # Each shard has its own part of it.
    "sharded array": lambda x: step_of(
        optax.adagrad(0.1, initial_accumulator_value=x), num_shards=2, weight_update="sharded"
    ),
    "loss scale": scaled,
}


@pytest.mark.parametrize("what", STEPS)
def test_what_an_optimizers_init_puts_in_is_compared(monkeypatch: pytest.MonkeyPatch, what: str):
    make = STEPS[what]
    told = told_by_two(monkeypatch, lambda process: make(4.0 + process).init(W))
    assert told[0] == told[1]
    assert told[0].startswith(
        "ProgramMismatchError: The processes would not run the same init: process 1 differs. Its "
        "line "
    )
    # The number, as XLA writes it.
    one, other = ("dense<4>", "dense<5>") if what == "key" else ("dense<4.0", "dense<5.0")
    assert told[0].index(other) < told[0].index(one)
    assert told_by_two(monkeypatch, lambda _: make(4.0).init(W)) == ["taken"] * 2


def test_what_is_passed_to_init_is_told_first(monkeypatch: pytest.MonkeyPatch):
    opt = lambda x: optax.inject_hyperparams(optax.sgd)(x)
    told = told_by_two(monkeypatch, lambda process: step_of(opt(process)).init(W + process))
    assert told[0].startswith("ArgumentError: To init, process 1 passed parameters checksum ")


def test_what_reshard_makes_is_compared(monkeypatch: pytest.MonkeyPatch):
    state = step_of().init(W)
    reshard = lambda number: scaled(number).reshard(state)
    with pytest.warns(CheckpointWarning, match="loss_scale is new"):
        told = told_by_two(monkeypatch, lambda process: reshard(4.0 + process))
    assert told[0] == told[1]
    assert "would not run the same init: process 1 differs" in told[0]
    with pytest.warns(CheckpointWarning, match="loss_scale is new"):
        assert told_by_two(monkeypatch, lambda _: reshard(4.0)) == ["taken"] * 2


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_what_a_function_closes_over_is_compared(monkeypatch: pytest.MonkeyPatch, call: str):
    steps = [step_of() for _ in range(2)]
    states = [step.init(W) for step in steps]
    seen: dict[int, int] = {0: 0, 1: 0}

    def run(process: int, number: float) -> Any:
        # Two kinds of batches, twice.
        batches = [ROWS, ROWS, np.repeat(ROWS, 2, 0), np.repeat(ROWS, 2, 0)]

        def function(w: Any, x: Any) -> Any:
            seen[process] += 1
            return (x @ w - number) ** 2

        return getattr(steps[process], call)(states[process], batches, function)

    told = told_by_two(monkeypatch, lambda process: run(process, 4.0 + process))
    assert told[0] == told[1]
    assert f"would not run the same {call}: process 1 differs. Its line " in told[0]
    assert "and pass the same function" in told[0]
    seen.update({0: 0, 1: 0})
    assert told_by_two(monkeypatch, lambda process: run(process, 4.0)) == ["taken"] * 2
    # To compare costs no further trace.
    assert seen == {0: 2, 1: 2}


def test_batches_are_told_before_functions(monkeypatch: pytest.MonkeyPatch):
    step = step_of()
    state = step.init(W)

    def run(process: int) -> Any:
        return step.evaluate(state, [ROWS[process:]], lambda w, x: x @ w - process)

    told = told_by_two(monkeypatch, run)
    assert told[0].startswith("ArgumentError: To evaluate, process 1 passed batches: 0 and a ")


def test_one_process_lowers_nothing_to_compare(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_jax, "without_addresses", None)
    step = step_of()
    state = scaled(4.0).reshard(scaled(4.0).init(W))
    assert float(state.opt_state.loss_scale.scale) == 4
    assert step.evaluate(step.init(W), [ROWS], lambda w, x: x @ w) == 23
