"""Types over the shards, under shard_map(check_vma=True): what is refused, and in which words."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, shard_context
from crossshard.errors import ArgumentError, ArgumentTypeError, DoubleReductionError, IncomingError
from tests.step.common import on_one_device

RNG = np.random.default_rng(0)
W = RNG.normal(size=(64, 33)).astype(np.float32)
X = RNG.normal(size=(8, 64)).astype(np.float32)
BOTH = {"in_specs": (P(), P("shards")), "out_specs": P("shards")}
checks = pytest.mark.parametrize("check_vma", [True, False])


def on_shards(function: Any, **kwargs: Any) -> Any:
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, **(kwargs or BOTH)))


def loss(w: Any, x: Any) -> Any:
    return ((x @ w) ** 2).mean()


def step_of(opt: CrossShardOptimizer) -> Any:
    def step(w: Any, state: Any, x: Any) -> Any:
        updates, state = opt.update(crossshard.grad(loss)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    return step


@checks
def test_a_whole_state_is_not_taken_for_a_part(check_vma: bool):
    opt = CrossShardOptimizer(optax.adam(0.1), weight_update="sharded")
    with shard_context(1):
        state = opt.init(W)
    specs = {"in_specs": (P(), P(), P("shards")), "out_specs": P(), "check_vma": check_vma}
    with pytest.raises(ArgumentError, match=r"\(64, 33\).*init inside jax\.shard_map.*state_specs"):
        on_shards(step_of(opt), **specs)(W, state, X)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1, eps=1e-3)])
def test_a_state_as_the_error_says_it(optimizer: Any):
    opt = CrossShardOptimizer(optimizer, weight_update="sharded")
    specs = opt.state_specs(W, 8)
    w, state = W, on_shards(opt.init, in_specs=P(), out_specs=specs)(W)
    run = on_shards(step_of(opt), in_specs=(P(), specs, P("shards")), out_specs=(P(), specs))
    for _ in range(3):
        w, state = run(w, state, X)
    alone, _ = on_one_device(loss, optimizer, W, [X] * 3)
    np.testing.assert_allclose(w, alone, rtol=1e-4, atol=1e-5)


# What types refuse without a fault of autodiff: the words say what to write.


def varying(shape: Any) -> Any:
    return jax.lax.pcast(jnp.zeros(shape), "shards", to="varying")


def scanned(w: Any, x: Any, start: Any = jnp.zeros) -> Any:
    of_row = lambda total, row: (total + ((row @ w) ** 2).sum(), None)
    return jax.lax.scan(of_row, start(()), x)[0] / len(x)


def branched(w: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() < 1e9, lambda: scanned(w, x, varying), lambda: jnp.zeros(()))


def functional(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: crossshard.value_and_grad(loss)(w, x)[1]


def stateful(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        param, opt = nnx.Param(w), crossshard.CrossShardOptimizer(optax.sgd(1.0))
        return opt.compute_gradients(lambda: loss(param[...], x), var_list=[param])[0][0]

    return step


@pytest.mark.parametrize("idiom", [functional, stateful])
@pytest.mark.parametrize("loss", [scanned, branched])
def test_a_carry_that_starts_equal_on_all_shards(loss: Any, idiom: Any):
    words = r"equal on all shards.*pcast\(jnp.zeros\(\(\)\), 'shards', to='varying'\).*check_vma=Fa"
    with pytest.raises(ArgumentTypeError, match=words) as caught:
        on_shards(idiom(loss)).trace(W, X)
    assert "manual axis types" in str(caught.value.__cause__)


def test_what_the_words_say_is_right():
    expected = jax.jit(jax.grad(scanned))(W, X)
    cast = on_shards(functional(lambda w, x: scanned(w, x, varying)))
    unchecked = on_shards(functional(scanned), **BOTH, check_vma=False)
    for run in (cast, unchecked):
        got = run(W, X).reshape(8, *W.shape).mean(axis=0)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_other_mistakes_of_a_loop_stay_jaxs_own():
    wrong = lambda w, x: jax.lax.scan(lambda c, row: (row @ w, row), jnp.zeros(2), x)[0]
    with pytest.raises(TypeError, match="carry") as caught:
        on_shards(functional(wrong)).trace(W, X)
    assert not isinstance(caught.value, crossshard.CrossshardError)


def test_multi_steps_around_the_optimizer_is_named():
    opt = optax.MultiSteps(crossshard.CrossShardOptimizer(optax.sgd(1.0)), 2)
    step = lambda w, x: opt.update(crossshard.grad(loss)(w, x), opt.init(w), w)[0]
    with pytest.raises(DoubleReductionError, match=r"MultiSteps.*its sums.*accumulate_steps"):
        on_shards(step).trace(W, X)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1, eps=1e-3)])
def test_what_is_summed_by_a_sum_of_ones_own_is_not_summed_again(optimizer: Any):
    opt = CrossShardOptimizer(optimizer)
    state = opt.init(W)

    def updates(w: Any, x: Any) -> Any:
        """One way after the other that the error names; and what it refuses."""
        own = crossshard.grad(loss)(w, x)
        update = lambda gradient, incoming: opt.update(gradient, state, w, incoming=incoming)[0]
        for incoming in ("summed", "reduced"):
            with pytest.raises(
                IncomingError,
                match=r"with cross_replica_sum, .*leave that sum out, or write jax\.lax\.psum",
            ):
                update(crossshard.cross_replica_sum(own), incoming)
        psum, pmean = (each(own, "shards") for each in (jax.lax.psum, jax.lax.pmean))
        return update(own, "local"), update(psum, "summed"), update(pmean, "reduced")

    found = on_shards(updates, in_specs=(P(), P("shards")), out_specs=P())(W, X)
    want, _ = optimizer.update(jax.grad(loss)(W, X), optimizer.init(W), W)
    for each in found:
        np.testing.assert_allclose(each, want, rtol=1e-4, atol=1e-7)
