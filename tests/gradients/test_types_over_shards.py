"""What types over the shards refuse without a fault of autodiff: the words say what to write."""

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

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
W = np.ones(3, np.float32)


def on_shards(step: Callable[..., Any], *, check_vma: bool = True) -> Any:
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    run = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("shards")), out_specs=P("shards"), check_vma=check_vma
    )
    return jax.jit(run)


def scanned(w: Any, x: Any, start: Any = jnp.zeros) -> Any:
    return jax.lax.scan(lambda sum, row: (sum + (row @ w) ** 2, None), start(()), x)[0] / len(x)


def branched(w: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() < 1e9, lambda: scanned(w, x, varying), lambda: jnp.zeros(()))


def varying(shape: Any) -> Any:
    return jax.lax.pcast(jnp.zeros(shape), "shards", to="varying")


def functional(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: crossshard.value_and_grad(loss)(w, x)[1]


def stateful(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        param = nnx.Param(w)
        opt = crossshard.CrossShardOptimizer(optax.sgd(1.0))
        return opt.compute_gradients(lambda: loss(param[...], x), var_list=[param])[0][0]

    return step


@pytest.mark.parametrize("idiom", [functional, stateful])
@pytest.mark.parametrize("loss", [scanned, branched])
def test_a_carry_that_starts_equal_on_all_shards(loss: Any, idiom: Any):
    words = r"equal on all shards.*pcast\(jnp.zeros\(\(\)\), 'shards', to='varying'\).*check_vma=Fa"
    with pytest.raises(crossshard.errors.ArgumentTypeError, match=words) as caught:
        on_shards(idiom(loss)).trace(W, X)
    assert "manual axis types" in str(caught.value.__cause__)


def test_what_the_words_say_is_right():
    expected = jax.grad(scanned)(W, X)
    cast = on_shards(functional(lambda w, x: scanned(w, x, varying)))
    unchecked = on_shards(functional(scanned), check_vma=False)
    for run in (cast, unchecked):
        np.testing.assert_allclose(run(W, X).reshape(4, 3).mean(axis=0), expected, rtol=1e-6)


def test_other_mistakes_of_a_loop_stay_jaxs_own():
    wrong = lambda w, x: jax.lax.scan(lambda c, row: (row @ w, row), jnp.zeros(2), x)[0]
    with pytest.raises(TypeError, match="carry") as caught:
        on_shards(functional(wrong)).trace(W, X)
    assert not isinstance(caught.value, crossshard.CrossshardError)


def test_multi_steps_around_the_optimizer_is_named():
    opt = optax.MultiSteps(crossshard.CrossShardOptimizer(optax.sgd(1.0)), 2)

    def step(w: Any, x: Any) -> Any:
        gradient = crossshard.grad(lambda w, x: ((x @ w) ** 2).mean())(w, x)
        return opt.update(gradient, opt.init(w), w)[0]

    match = r"inside optax.MultiSteps.*accumulate_ste"
    with pytest.raises(crossshard.errors.DoubleReductionError, match=match):
        on_shards(step).trace(W, X)
