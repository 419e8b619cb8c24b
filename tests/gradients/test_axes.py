"""crossshard.grad where several axes are bound: which have parts of the batch, what is summed.

A loss whose gradient autodiff would sum over an axis that is not a shard axis is refused.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import AxisError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype(np.float32)
PARAMS = {
    "a": RNG.normal(size=(6, 4)).astype(np.float32),
    "b": RNG.normal(size=(4, 1)).astype(np.float32),
    "scale": np.float32(1.5),
}
# The hidden units are split over the axis `model`, the rows of the batch over `data`.
SPECS = {"a": P(None, "model"), "b": P("model"), "scale": P()}
BY_MODEL = (SPECS, P("data"))
NAMED = r"psum or pmean over 'model' \(.*_axes.py:\d+\), which is not a shard axis.*2 times"


def check(run: Any, names: Any = PARAMS) -> None:
    """The updates of a step are those of the mean over the whole batch, by hand, in float64."""
    a, b, scale = (PARAMS[name].astype(np.float64) for name in ("a", "b", "scale"))
    hidden = np.tanh(X @ a)
    out = hidden @ b
    error = 2 * scale * out / len(X)
    of_hidden = (error * scale) @ b.T * (1 - hidden**2)
    want = {"a": X.T @ of_hidden, "b": hidden.T @ (error * scale), "scale": (error * out).sum()}
    updates = run.lower().compile()({name: PARAMS[name] for name in names}, X)
    for name in names:
        np.testing.assert_allclose(-updates[name], want[name], rtol=1e-5, atol=1e-6)


def traced(
    step: Callable[..., Any],
    *args: Any,
    specs: Any = BY_MODEL,
    out_specs: Any = None,
    check_vma: bool = False,
) -> Any:
    """A step traced in ``shard_map``: what is refused is so before anything is compiled."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    how: Any = {"in_specs": specs, "out_specs": specs[0] if out_specs is None else out_specs}
    run = jax.shard_map(step, mesh=mesh, check_vma=check_vma, **how)
    return jax.jit(run).trace(*(args or (PARAMS, X)))


def updates(loss: Callable[..., Any], axis_name: Any = "data") -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        opt = CrossShardOptimizer(optax.sgd(1.0), axis_name="data")
        gradients = crossshard.grad(loss, axis_name=axis_name)(params, x)
        return opt.update(gradients, opt.init(params), params)[0]

    return step


def with_sum(total: Callable[[Any], Any]) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        out = total(jnp.tanh(x @ params["a"]) @ params["b"])
        return ((out * params["scale"]) ** 2).mean()

    return loss


def plain(x: Any) -> Any:
    return lax.psum(x, "model")


class Model(nnx.Module):
    def __init__(self, params: Any):
        self.a, self.b = nnx.Param(params["a"]), nnx.Param(params["b"])
        self.calls = nnx.Variable(jnp.int32(0))


# With types.


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_parameters_that_are_split_over_another_axis(axis_name: str | None):
    check(traced(updates(with_sum(plain), axis_name), check_vma=True))


def test_parameters_of_a_module_that_are_split_over_another_axis():
    def step(params: Any, x: Any) -> Any:
        values = lambda model: {"a": model.a[...], "b": model.b[...], "scale": 1.5}
        loss = lambda model, x: with_sum(plain)(values(model), x)
        opt = CrossShardOptimizer(optax.sgd(1.0), axis_name="data")
        grads = nnx.to_pure_dict(crossshard.grad(loss)(Model(params), x))
        return opt.update(grads, opt.init(grads))[0]

    specs = {name: SPECS[name] for name in ("a", "b")}
    params = {name: PARAMS[name] for name in specs}
    check(traced(step, params, X, specs=(specs, P("data")), check_vma=True), specs)


def test_a_loss_that_is_reduced_over_one_of_two_axes_is_ambiguous():
    def step(scale: Any, x: Any) -> Any:
        of_row = lambda scale, x: lax.pmean((scale * x).mean(), "model")
        return crossshard.grad(of_row)(scale, x)

    specs = (P(), P("data", "model"))
    with pytest.raises(AxisError, match=r"already reduced over 'model'.*axis_name='data'"):
        traced(step, jnp.float32(2), X, specs=specs, out_specs=P("data"), check_vma=True)


def test_the_advice_is_not_to_average_the_parts_of_different_tensors():
    def step(params: Any, x: Any) -> Any:
        opt = CrossShardOptimizer(optax.sgd(1.0))
        return opt.update(params, opt.init(params))[0]

    with pytest.raises(AxisError, match="axis_name='data'") as caught:
        traced(step, check_vma=True)
    assert "('data', 'model')" not in str(caught.value)


# Sums over an axis that is not a shard axis, without types.


def in_scan(x: Any) -> Any:
    return lax.scan(lambda carry, row: (carry, lax.psum(row, "model")), 0, x)[1]


def in_cond(x: Any) -> Any:
    return lax.cond(lax.axis_index("data") < 4, plain, lambda x: x, x)


SUMS = {
    "psum": plain,
    "pmean": lambda x: 2 * lax.pmean(x, "model"),
    "of two axes": lambda x: lax.pmean(lax.psum(x, ("data", "model")), "data"),
    "scan": in_scan,
    "cond": in_cond,
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_another_axis_is_refused(name: str):
    with pytest.raises(AxisError, match=NAMED):
        traced(updates(with_sum(SUMS[name])))


def test_a_sum_over_one_of_several_axes_is_refused_where_none_is_named():
    with pytest.raises(AxisError, match=r"not named as a shard axis.*axis_name='data'"):
        traced(updates(with_sum(plain), axis_name=None))


def test_value_and_grad_of_a_module_and_compute_gradients_refuse_it():
    def loss(model: Model, x: Any) -> Any:
        model.calls[...] += 1
        return plain(jnp.tanh(x @ model.a[...]) @ model.b[...]).mean()

    def of_module(params: Any, x: Any) -> Any:
        return crossshard.value_and_grad(loss, axis_name="data")(Model(params), x)[1]

    def stateful(params: Any, x: Any) -> Any:
        model, opt = Model(params), CrossShardOptimizer(optax.sgd(1.0), axis_name="data")
        return opt.minimize(lambda: loss(model, x), var_list=model)

    for step in (of_module, stateful):
        with pytest.raises(AxisError, match=NAMED):
            traced(step)


@jax.custom_vjp
def own_sum(x: Any) -> Any:
    return plain(x)


own_sum.defvjp(lambda x: (plain(x), None), lambda _, gradient: (gradient,))


def detached(params: Any, x: Any) -> Any:
    """Sums of what has no derivative: inputs, a constant, a choice, a statistic."""
    out = own_sum(jnp.tanh(x @ params["a"]) @ params["b"])
    shift = plain(lax.stop_gradient(out)) + plain(x.sum()) + plain((out > 0).sum())
    return ((out * params["scale"]) ** 2 + 0 * shift).mean()


@pytest.mark.parametrize("loss", [with_sum(own_sum), detached])
def test_a_sum_with_a_derivative_of_its_own_is_right(loss: Any):
    check(traced(updates(loss)))


def test_a_sum_that_is_only_returned_besides_is_right():
    def loss(params: Any, x: Any) -> Any:
        value = with_sum(own_sum)(params, x)
        return value, lax.pmean(value, ("data", "model"))

    def step(params: Any, x: Any) -> Any:
        return crossshard.grad(loss, has_aux=True, axis_name="data")(params, x)[0]

    traced(step)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_name", [("data", "model"), None])
def test_axes_that_all_count_shards_may_be_summed_over(axis_name: Any, check_vma: bool):
    over_both = lambda loss: loss if check_vma else lax.pmean(loss, ("data", "model"))

    def step(scale: Any, x: Any) -> Any:
        opt = CrossShardOptimizer(optax.sgd(1.0), axis_name=("data", "model"))
        loss = lambda scale, x: over_both((scale * x).mean())
        gradient = crossshard.grad(loss, axis_name=axis_name)(scale, x)
        return opt.update(gradient, opt.init(scale), scale)[0]

    specs = P(), P(("data", "model"))
    run = traced(step, jnp.float32(2), X, specs=specs, check_vma=check_vma).lower().compile()
    np.testing.assert_allclose(-run(jnp.float32(2), X), X.mean(), rtol=1e-5)


def gathered(params: Any, x: Any, reduce: Callable[[Any], Any] = lambda loss: loss) -> Any:
    """The hidden units are split over ``model``, and all along it compute the same loss of them."""
    hidden = lax.all_gather(jnp.tanh(x @ params["a"]), "model", axis=1, tiled=True)
    b = lax.all_gather(params["b"], "model", tiled=True)
    return reduce(((hidden @ b * params["scale"]) ** 2).mean())


def test_a_gather_of_what_is_computed_is_refused_without_types():
    with pytest.raises(AxisError, match=r"an all_gather over 'model' \(.*not a shard axis"):
        traced(updates(gathered))


def test_a_gather_of_parameters_is_right_for_rows_of_their_own():
    def loss(params: Any, x: Any) -> Any:
        split = {"a": 1, "b": 0}
        gather = lambda name, axis: lax.all_gather(params[name], "model", axis=axis, tiled=True)
        whole = {name: gather(name, axis) for name, axis in split.items()}
        # Two devices along `model` have rows of their own, and their losses are added.
        return with_sum(lambda out: out)({**whole, "scale": params["scale"]}, x) / 2

    def step(params: Any, x: Any) -> Any:
        new = updates(loss)(params, x)
        return {**new, "scale": lax.psum(new["scale"], "model")}

    check(traced(step, specs=(SPECS, P(("data", "model")))))


@pytest.mark.parametrize("idiom", ["grad", "compute_gradients"])
def test_a_loss_that_varies_over_another_axis_is_refused(idiom: str):
    def stateful(params: Any, x: Any) -> Any:
        variables = {name: nnx.Param(value) for name, value in params.items()}
        read = lambda: gathered({name: v[...] for name, v in variables.items()}, x)
        opt = CrossShardOptimizer(optax.sgd(1.0), axis_name="data")
        return opt.compute_gradients(read, var_list=list(variables.values()))[0][0]

    words = r"varies by its type over 'model'.*over 2 losses.*pmean\(loss, 'model'\)"
    with pytest.raises(AxisError, match=words):
        traced(updates(gathered) if idiom == "grad" else stateful, check_vma=True)


def test_what_its_words_say_is_right():
    loss = lambda params, x: gathered(params, x, lambda loss: lax.pmean(loss, "model"))
    check(traced(updates(loss), check_vma=True))
