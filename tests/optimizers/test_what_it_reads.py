"""What an optimizer closes over, as a schedule may: given to the step it is read, or refused."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import VariableError
from tests.quick import deep_but

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def rate_of(rate: nnx.Variable) -> Callable[[Any], Any]:
    return lambda _: rate[...]


CLOSED_OVER: dict[str, Callable[[nnx.Variable], Any]] = {
    "sgd": lambda rate: optax.sgd(rate_of(rate)),
    "adam": lambda rate: optax.adam(rate_of(rate)),
    "a partition": lambda rate: optax.partition(
        {"all": optax.sgd(rate_of(rate))}, lambda p: jax.tree.map(lambda _: "all", p)
    ),
    "inject_hyperparams": lambda rate: optax.inject_hyperparams(optax.sgd)(rate_of(rate)),
}


def train(model: Any, opt: Any, x: Any) -> Any:
    return opt.minimize(lambda: (model(x) ** 2).mean(), var_list=model)


def made(name: str) -> tuple[nnx.Variable, nnx.Linear, CrossShardOptimizer]:
    rate = nnx.Variable(jnp.array(0.1))
    opt = CrossShardOptimizer(CLOSED_OVER[name](rate))
    return rate, nnx.Linear(3, 1, rngs=nnx.Rngs(0)), opt


@pytest.mark.parametrize(
    ("name", "held"),
    deep_but(
        lambda case: case[0] == "sgd" or not case[1],
        [(name, held) for name in CLOSED_OVER for held in (False, True)],
    ),
)
def test_a_step_that_is_given_it_reads_it(name: str, held: bool):
    rate, model, opt = made(name)
    holder = nnx.Dict(model=model, opt=opt, rate=rate)
    step = crossshard.shard(num_shards=8)(
        (lambda holder, x: train(holder.model, holder.opt, x))
        if held
        else (lambda model, opt, rate, x: train(model, opt, x))
    )
    run = functools.partial(step, *([holder] if held else [model, opt, rate]), X)
    before = np.asarray(model.kernel[...])
    run()
    after = np.asarray(model.kernel[...])
    assert np.abs(after - before).max() > 1e-3
    rate[...] = jnp.array(0.0)
    run()
    np.testing.assert_array_equal(model.kernel[...], after)
    rate[...] = jnp.array(0.1)
    run()
    assert np.abs(model.kernel[...] - after).max() > 1e-3


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_where_it_is_not_given_it_is_refused(name: str):
    rate, model, opt = made(name)
    opt.build(model)
    message = r"reads Variable float32\[\].*closes over.*inject_hyperparams"
    with crossshard.shard_context(1), pytest.raises(VariableError, match=message):
        nnx.jit(train)(model, opt, X)
    with pytest.raises(VariableError, match=message):
        crossshard.shard(num_shards=8)(train)(model, opt, X)
    # inject_hyperparams reads it once, when the state is made, and keeps its value there.
    step = crossshard.make_train_step(
        lambda p, x: (x * p).mean(), CrossShardOptimizer(CLOSED_OVER[name](rate))
    )
    with pytest.raises(VariableError, match=message):
        step(step.init(jnp.ones(3)), X)


def test_outside_of_any_trace_it_is_read_as_it_is():
    rate, model, opt = made("sgd")
    before = np.asarray(model.kernel[...])
    rate[...] = jnp.array(0.0)
    with crossshard.shard_context(1):
        train(model, opt, X)
    np.testing.assert_array_equal(model.kernel[...], before)
