"""What make_train_step and its steps refuse, by name, and that nothing is lost by it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import crossshard
from crossshard import (
    ArgumentError,
    ArgumentTypeError,
    GroupAssignmentError,
    NestedReductionError,
    VariableError,
    make_train_step,
)

ROWS = np.ones((8, 3), np.float32)
PARAMS = {"w": np.ones((64, 64), np.float32)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return (params["w"] ** 2).sum() * batch.mean()


def bad(name: str, call: Callable[[], Any], error: type, *names: str) -> Any:
    return pytest.param(call, error, names, id=name)


def make(loss: Any = loss_fn, opt: Any = None, **kwargs: Any) -> Callable[[], Any]:
    kwargs = {"num_shards": 4} | kwargs
    return lambda: make_train_step(loss, optax.sgd(0.1) if opt is None else opt, **kwargs)


def wrapped(**kwargs: Any) -> Any:
    return crossshard.CrossShardOptimizer(optax.sgd(0.1), **kwargs)


def init(params: Any, *rest: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: make(**kwargs)().init(params, *rest)


def step_on(batch: Any, **kwargs: Any) -> Callable[[], Any]:
    def call() -> Any:
        step = make(**kwargs)()
        return step(step.init(PARAMS), batch)

    return call


def state_of_another_step() -> Any:
    adam, sgd = make(opt=optax.adam(0.1))(), make()()
    return sgd(adam.init(PARAMS), ROWS)


def state_of_another_number_of_shards() -> Any:
    odd = {"w": np.ones((37, 41), np.float32)}
    three, four = (
        make(opt=optax.adam(0.1), num_shards=number, weight_update="sharded")() for number in (3, 4)
    )
    return four(three.init(odd), ROWS)


class Sowing(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))


def sow(model: Any, batch: Any) -> jax.Array:
    model.seen = nnx.Variable(batch.sum())
    return (model.w[...] * batch).sum()


# fmt: off
TABLE = [
    bad("no function", make(loss=3), ArgumentTypeError, "loss_fn must be a function", "3"),
    bad("a loss of one argument", make(loss=lambda p: p), ArgumentTypeError,
        "(params, batch)", "['p']"),
    bad("a loss of four", make(loss=lambda a, b, c, d: a), ArgumentTypeError, "'d'"),
    bad("no optimizer", make(opt=0.1), ArgumentTypeError, "Optax transformation", "float"),
    bad("a factory", make(opt=optax.adam), ArgumentTypeError, "adam(learning_rate)"),
    bad("no shards", make(num_shards=0), ArgumentError, "0"),
    bad("half a shard", make(num_shards=2.5), ArgumentTypeError, "2.5"),
    bad("too many shards", make(num_shards=1000), ArgumentError, "1000 shards", "8"),
    bad("no mesh", make(num_shards=None, mesh="data"), ArgumentTypeError, "jax.sharding.Mesh"),
    bad("a mesh of another size",
        make(num_shards=2, mesh=Mesh(np.array(jax.devices()[:4]), ("x",))),
        ArgumentError, "num_shards is 2", "4 devices"),
    bad("an unknown weight update", make(weight_update="zero1"), ArgumentError,
        "'zero1'", "'auto'", "'replicated'", "'sharded'"),
    bad("a weight that is a number", make(weight=3), ArgumentTypeError, "got 3", "examples"),
    bad("a weight with SUM", make(opt=wrapped(reduction="sum"), weight=len), ArgumentError,
        "SUM", "MEAN"),
    bad("groups of other shards",
        make(opt=wrapped(group_assignment=[[0, 1], [2, 3]]), num_shards=8),
        GroupAssignmentError, "range(8)"),
    bad("another axis", make(opt=wrapped(axis_name="data")), ArgumentError, "data", "shards"),
    bad("gradients said to be summed", make(opt=wrapped(incoming="summed")), ArgumentError,
        "'summed'", "Leave incoming out"),
    bad("nothing to train", init({"n": np.arange(3)}), ArgumentError, "nothing to train", "dict"),
    bad("no parameters", init({}), ArgumentError, "nothing to train"),
    bad("a bare variable", init(nnx.Param(jnp.ones(3))), ArgumentTypeError, "nnx Param"),
    bad("a leaf that cannot be fixed", init((np.ones(3), bytearray(3))), ArgumentTypeError,
        "bytearray"),
    bad("a word for a key", init(PARAMS, "seed"), ArgumentTypeError, "'seed'", "jax.random.key"),
    bad("several keys", init(PARAMS, jax.random.split(jax.random.key(0), 2)), ArgumentTypeError,
        "jax.random.key"),
    bad("no state", lambda: make()()(PARAMS, ROWS), ArgumentTypeError, "init(params)", "dict"),
    bad("the state of another rule", state_of_another_step, ArgumentError, "another optimizer"),
    bad("the state of another number of shards", state_of_another_number_of_shards, ArgumentError,
        "another step", "reshard"),
    bad("rows that do not divide", step_on(np.ones((10, 3), np.float32)), ArgumentError,
        "10 rows", "4 shards", "2 are left over", "8 or 12", "weight="),
    bad("rows of one of two", step_on({"x": ROWS, "y": ROWS[:7]}), ArgumentError,
        "batch['y'] has 7 rows"),
    bad("a scalar in the batch", step_on({"x": ROWS, "n": np.float32(3)}), ArgumentError,
        "batch['n'] is a scalar"),
    bad("a word in the batch", step_on({"x": ROWS, "n": "train"}), ArgumentTypeError,
        "batch['n'] must be an array", "'train'"),
    bad("an array of words", step_on(np.array(["a"] * 8)), ArgumentTypeError, "<U1"),
    bad("an empty batch", step_on({}), ArgumentError, "empty"),
    bad("a weight that counts padding", step_on(np.ones((10, 3), np.float32), weight=len),
        ArgumentError, "10 rows", "weight 0", "mask"),
    bad("a weight that is not in the batch", step_on(ROWS, weight="mask"), ArgumentError, "'mask'"),
    bad("a weight of many numbers", step_on(ROWS, weight=lambda batch: batch[:, 0]), ArgumentError,
        "one number", "(2,)"),
    bad("padding of different lengths",
        step_on({"x": ROWS[:7], "y": ROWS[:6], "mask": np.ones(7)}, weight="mask",
                loss=lambda p, b: (p["w"] ** 2).sum() * b["x"].mean()),
        ArgumentError, "[6, 7]"),
    bad("a loss of many numbers", step_on(ROWS, loss=lambda p, b: p["w"][0]), ArgumentError,
        "scalar", "(64,)"),
    bad("no aux", step_on(ROWS, has_aux=True), ArgumentTypeError, "(loss, aux)"),
    bad("an optimizer inside that reduces again", step_on(ROWS, opt=optax.chain(wrapped())),
        NestedReductionError, "twice"),
    bad("a loss that makes variables",
        lambda: (step := make(loss=sow)()) and step(step.init(Sowing()), ROWS),
        VariableError, "added or removed variables"),
    bad("a description too soon", lambda: make()().describe(), ArgumentError, "init(params)"),
    bad("the model of no group in particular",
        lambda: (step := make(opt=wrapped(group_assignment=[[0, 1], [2, 3]]))())
        and step.model(step.init(PARAMS)), ArgumentError, "model(state, shard=0)"),
]
# fmt: on


@pytest.mark.parametrize(("call", "error", "names"), TABLE)
def test_a_wrong_call(call: Callable[[], Any], error: type, names: tuple[str, ...]):
    with pytest.raises(error) as caught:
        call()
    assert issubclass(error, crossshard.CrossshardError)
    for name in names:
        assert name in str(caught.value)


def test_the_table_is_long_enough():
    assert len({case.id for case in TABLE}) == len(TABLE) >= 40


def test_a_refused_batch_costs_no_state():
    step = make(opt=optax.adam(0.1), weight_update="sharded")()
    state = step.init(PARAMS)
    for batch in (ROWS[:7], {}, "rows", np.float32(1)):
        with pytest.raises(crossshard.CrossshardError):
            step(state, batch)
    state, metrics = step(state, ROWS)
    assert float(metrics["loss"]) == 64 * 64
