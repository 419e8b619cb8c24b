"""One update, right in every way JAX runs shards; and a sum that is never taken twice."""

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
from crossshard import CrossShardOptimizer
from crossshard.errors import AxisError, DoubleReductionError
from tests.collectives.test_collectives import MODES, per_shard
from tests.quick import deep

X = np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
W = np.array([0.5, -1.0, 2.0], np.float32)
GROUPS = [[0, 2, 5, 7], [1, 3, 4, 6]]


def loss(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ w - y) ** 2)


# In float64 by hand, so that nothing here compares JAX with itself.
LOCAL = np.stack(
    [2 * x.astype(float).T @ (x.astype(float) @ W - y) / len(y) for x, y in zip(X, Y, strict=True)]
)
MEAN = LOCAL.mean(0)


def mesh(*axes: tuple[str, int]) -> jax.sharding.Mesh:
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def sgd(**kwargs: Any) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.sgd(1.0), **kwargs)


def step(opt: CrossShardOptimizer, w: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    gradient = crossshard.grad(loss)(w, x, y)
    return opt.update(gradient, opt.init(w), w, **kwargs)[0]


def in_shard_map(function: Any, axes: Any = (("shards", 8),), **kwargs: Any) -> Any:
    """Runs it once per shard on (w, x[0], y[0]); the results as [shards, …]."""
    where = mesh(*axes)
    names = where.axis_names

    def of_one(w: Any, x: Any, y: Any) -> Any:
        return function(w, x[0], y[0])[None]

    run = jax.shard_map(
        of_one, mesh=where, in_specs=(P(), P(names), P(names)), out_specs=P(names), **kwargs
    )
    return np.asarray(jax.jit(run)(W, X, Y))


# A sum, and groups, are the same code where there are types and where there are none.
CASES: list[Any] = [
    ("sum", "check_vma"),
    ("groups", "check_vma"),
    ("groups", "two axes, no check_vma"),
    deep(("groups", "vmap of vmap")),
]
OF_MEANS = {*MODES} - {"vmap in shard_map", "two axes, no check_vma", "vmap of vmap"}
CASES += [each if each[1] in OF_MEANS else deep(each) for each in (("mean", m) for m in MODES)]


@pytest.mark.parametrize(("how", "mode"), CASES)
def test_every_mode(how: str, mode: str):
    options = {"group_assignment": GROUPS} if how == "groups" else {"reduction": how}
    opt = sgd(axis_name=MODES[mode], **options)
    updates = np.asarray(per_shard(mode, lambda x, y: step(opt, jnp.asarray(W), x, y), X, Y))
    factor = 8 if how == "sum" else 1
    for group in GROUPS if how == "groups" else [list(range(8))]:
        expected = np.tile(-factor * LOCAL[group].mean(0), (len(group), 1))
        atol = 1e-6 if how == "groups" else 0
        np.testing.assert_allclose(updates[group], expected, rtol=2e-6, atol=atol)


def test_one_axis_of_two():
    def function(w: Any, x: Any, y: Any) -> Any:
        gradient = crossshard.grad(loss, axis_name="shard")(w, x, y)
        opt = sgd(axis_name="shard")
        return opt.update(gradient, opt.init(w), w)[0]

    updates = in_shard_map(function, [("slice", 2), ("shard", 4)], check_vma=False)
    expected = -LOCAL.reshape(2, 4, 3).mean(1).repeat(4, 0)
    np.testing.assert_allclose(updates, expected, rtol=2e-6, atol=1e-6)


def test_the_result_is_typed_equal_so_it_can_leave_as_replicated():
    def of_one(w: Any, x: Any, y: Any) -> Any:
        return step(sgd(), w, x[0], y[0])

    spec = P("shards")
    run = jax.shard_map(of_one, mesh=mesh(("shards", 8)), in_specs=(P(), spec, spec), out_specs=P())
    np.testing.assert_allclose(jax.jit(run)(W, X, Y), -MEAN, rtol=2e-6)


# The double-reduction trap.


def of_autodiff(
    opt: Any, vary: Any = lambda w: w, axes: Any = (("shards", 8),), **kwargs: Any
) -> np.ndarray:
    """The updates from the gradients of ``jax.grad``, which sums those of equal parameters."""

    def function(w: Any, x: Any, y: Any) -> Any:
        return opt.update(jax.grad(loss)(vary(w), x, y), opt.init(w), w, **kwargs)[0]

    return in_shard_map(function, axes)


@pytest.mark.parametrize("rule", [optax.sgd, optax.adam])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_gradient_that_autodiff_summed_is_refused(rule: Any, reduction: str):
    with pytest.raises(DoubleReductionError, match="axis 'shards'"):
        of_autodiff(CrossShardOptimizer(rule(1.0), reduction))


@pytest.mark.parametrize(
    ("incoming", "reduction", "factor"),
    [("summed", "mean", 1), ("summed", "sum", 8), ("reduced", "mean", 8), ("reduced", "sum", 8)],
)
def test_a_gradient_that_autodiff_summed_is_taken_as_what_the_caller_says(
    incoming: str, reduction: str, factor: int
):
    at_call = of_autodiff(sgd(reduction=reduction), incoming=incoming)
    at_construction = of_autodiff(sgd(reduction=reduction, incoming=incoming))
    for updates in (at_call, at_construction):
        np.testing.assert_allclose(updates, np.tile(-factor * MEAN, (8, 1)), rtol=2e-6)


def test_local_means_each_shards_own_also_where_it_is_equal_everywhere():
    opt = sgd(reduction="sum")
    run = lambda w, x, y: opt.update(w, opt.init(w), w, incoming="local")[0]
    np.testing.assert_allclose(in_shard_map(run), np.tile(-8 * W, (8, 1)))


def test_summed_over_one_axis_of_two_is_refused_with_that_axis():
    vary = lambda w: jax.lax.pcast(w, "shard", to="varying")
    with pytest.raises(DoubleReductionError, match="axis 'slice'"):
        of_autodiff(sgd(axis_name=("slice", "shard")), vary, [("slice", 2), ("shard", 4)])


def test_a_gradient_that_would_be_summed_over_one_axis_of_two_is_refused():
    def function(w: Any, x: Any, y: Any) -> Any:
        return crossshard.grad(loss, axis_name="shard")(w, x, y)

    with pytest.raises(AxisError, match=r"over 'slice'.*axis_name=\('slice', 'shard'\)"):
        in_shard_map(function, [("slice", 2), ("shard", 4)])


def test_unreduced_gradients_take_their_one_sum():
    updates = of_autodiff(sgd(), lambda w: jax.lax.pcast(w, "shards", to="reduced"))
    np.testing.assert_allclose(updates, np.tile(-MEAN, (8, 1)), rtol=2e-6)


# Local gradients.


def test_value_and_grad_is_jaxs_own_outside_of_shards():
    value, (gw, gx) = crossshard.value_and_grad(loss, argnums=(0, -2))(W, X[0], Y[0])
    expected, (ew, ex) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(W, X[0], Y[0])
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gw, ew)
    np.testing.assert_array_equal(gx, ex)


def test_a_loss_that_is_equal_on_all_shards_is_each_shards_own_copy():
    # Each shard's loss is the mean over all, so each gradient is an eighth of all shards' sum:
    # what one shard's parameters do to all eight copies.
    def function(w: Any, x: Any, y: Any) -> Any:
        return crossshard.grad(lambda w: jax.lax.pmean(loss(w, x, y), "shards"))(w)

    with_types = in_shard_map(function)
    np.testing.assert_allclose(with_types, in_shard_map(function, check_vma=False), rtol=1e-6)
    np.testing.assert_allclose(with_types, LOCAL, rtol=2e-6, atol=1e-6)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(W))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return x @ self.w[...]


def nnx_step(grad: Any, in_: Any) -> tuple[Net, nnx.Optimizer]:
    """A step with ``nnx.Optimizer``, on one shard's rows."""
    model = Net()
    optimizer = nnx.Optimizer(model, sgd(), wrt=nnx.Param)

    def of_one(model: Net, optimizer: nnx.Optimizer, x: Any, y: Any) -> Any:
        gradients = grad(lambda m: jnp.mean((m(x[0]) - y[0]) ** 2))(model)
        optimizer.update(model, gradients)

    in_(of_one)(model, optimizer, X, Y)
    return model, optimizer


def in_nnx_shard_map(function: Any) -> Any:
    specs = (P(), P(), P("shards"), P("shards"))
    return nnx.shard_map(function, mesh=mesh(("shards", 8)), in_specs=specs, out_specs=P())


@pytest.mark.parametrize(
    "in_", [lambda f: nnx.jit(in_nnx_shard_map(f)), crossshard.shard(num_shards=8)]
)
def test_nnx_modules_and_nnx_optimizer(in_: Any):
    model, optimizer = nnx_step(crossshard.grad, in_)
    np.testing.assert_allclose(model.w.get_value(), W - MEAN, rtol=2e-6)
    assert model.calls[...] == 1
    assert optimizer.step[...] == 1


def test_nnx_grad_of_a_module_is_refused_where_autodiff_has_summed_it():
    with pytest.raises(DoubleReductionError):
        nnx_step(nnx.grad, in_nnx_shard_map)


# As a part of other transformations.


def test_extra_arguments_pass_through_a_chain_and_the_loss_is_reduced():
    seen: dict[str, Any] = {}

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        seen.update(extra)
        return updates * extra["value"], state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    opt = optax.chain(CrossShardOptimizer(inner), optax.scale(-1.0))

    def function(w: Any, x: Any, y: Any) -> Any:
        value, gradient = crossshard.value_and_grad(loss)(w, x, y)
        return opt.update(gradient, opt.init(w), w, value=value, tag="mine")[0]

    values = [float(loss(W, x, y)) for x, y in zip(X, Y, strict=True)]
    for check_vma in (True, False):
        updates = in_shard_map(function, check_vma=check_vma)
        expected = -MEAN * np.mean(values)
        np.testing.assert_allclose(updates, np.tile(expected, (8, 1)), rtol=1e-5)
    assert seen["tag"] == "mine"
