"""crossshard.grad where several axes are bound: which of them have parts of the batch."""

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


def gradient() -> dict[str, np.ndarray]:
    """The gradient of the mean over the whole batch, by hand and in float64."""
    a, b, scale = (PARAMS[name].astype(np.float64) for name in ("a", "b", "scale"))
    hidden = np.tanh(X @ a)
    out = hidden @ b
    error = 2 * scale * out / len(X)
    of_hidden = (error * scale) @ b.T * (1 - hidden**2)
    return {
        "a": X.T @ of_hidden,
        "b": hidden.T @ (error * scale),
        "scale": (error * out).sum(),
    }


def on_mesh(function: Any, in_specs: Any, out_specs: Any, names: Any = ("data", "model")) -> Any:
    mesh = jax.make_mesh((4, 2), names, axis_types=(AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def loss(params: Any, x: Any) -> jax.Array:
    out = jax.lax.psum(jnp.tanh(x @ params["a"]) @ params["b"], "model")
    return ((out * params["scale"]) ** 2).mean()


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_parameters_that_are_split_over_another_axis(axis_name: str | None):
    def step(params: Any, x: Any) -> Any:
        opt = CrossShardOptimizer(optax.sgd(1.0), axis_name="data")
        gradients = crossshard.grad(loss, axis_name=axis_name)(params, x)
        return opt.update(gradients, opt.init(params), params)[0]

    updates = on_mesh(step, (SPECS, P("data")), SPECS)(PARAMS, X)
    for name, expected in gradient().items():
        np.testing.assert_allclose(-updates[name], expected, rtol=1e-5, atol=1e-6)


def test_parameters_of_a_module_that_are_split_over_another_axis():
    class Model(nnx.Module):
        def __init__(self, params: Any):
            self.a, self.b = nnx.Param(params["a"]), nnx.Param(params["b"])

    def step(params: Any, x: Any) -> Any:
        whole = lambda model, x: loss({"a": model.a[...], "b": model.b[...], "scale": 1.5}, x)
        opt = CrossShardOptimizer(optax.sgd(1.0), axis_name="data")
        grads = nnx.to_pure_dict(crossshard.grad(whole)(Model(params), x))
        return opt.update(grads, opt.init(grads))[0]

    specs = {name: SPECS[name] for name in ("a", "b")}
    params = {name: PARAMS[name] for name in ("a", "b")}
    updates = on_mesh(step, (specs, P("data")), specs)(params, X)
    for name in params:
        np.testing.assert_allclose(-updates[name], gradient()[name], rtol=1e-5, atol=1e-6)


def test_a_batch_that_is_split_over_both_axes():
    def step(scale: Any, x: Any) -> Any:
        opt = CrossShardOptimizer(optax.sgd(1.0), axis_name=("data", "model"))
        gradient = crossshard.grad(lambda scale, x: (scale * x).mean())(scale, x)
        return opt.update(gradient, opt.init(scale), scale)[0]

    update = on_mesh(step, (P(), P(("data", "model"))), P())(jnp.float32(2), X)
    np.testing.assert_allclose(-update, X.mean(), rtol=1e-5)


def test_a_loss_that_is_reduced_over_one_of_two_axes_is_ambiguous():
    def step(scale: Any, x: Any) -> Any:
        of_row = lambda scale, x: jax.lax.pmean((scale * x).mean(), "model")
        return crossshard.grad(of_row)(scale, x)

    with pytest.raises(AxisError, match=r"already reduced over 'model'.*axis_name='data'"):
        on_mesh(step, (P(), P("data", "model")), P("data"))(jnp.float32(2), X)


def test_the_advice_is_not_to_average_the_parts_of_different_tensors():
    def step(params: Any, x: Any) -> Any:
        opt = CrossShardOptimizer(optax.sgd(1.0))
        return opt.update(params, opt.init(params))[0]

    with pytest.raises(AxisError, match="axis_name='data'") as caught:
        on_mesh(step, (SPECS, P("data")), SPECS)(PARAMS, X)
    assert "('data', 'model')" not in str(caught.value)
