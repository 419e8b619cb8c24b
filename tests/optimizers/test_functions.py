"""Functions among the extra arguments: an optimizer would call them on one shard's rows alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentError
from tests.step.common import assert_close

X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
PARAMS = {"w": jnp.ones(5), "b": jnp.float32(0)}
SAM = optax.contrib.sam(
    optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.1)), opaque_mode=True
)
MESH = jax.make_mesh((4,), ("shards",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
# The optimizer, and what it takes, given the loss of a shard's rows, its value and its gradient.
TAKEN: dict[str, tuple[Any, Any]] = {
    "value_fn": (optax.lbfgs(), lambda loss, *now: {"value_fn": loss} | of_now(*now)),
    "grad_fn": (SAM, lambda loss, *_: {"grad_fn": lambda p, _: jax.grad(loss)(p)}),
}


def of_now(value: Any, gradients: Any) -> dict[str, Any]:
    return {"value": value, "grad": gradients}


def loss_of(x: Any) -> Any:
    return lambda p: (jnp.tanh(x @ p["w"] + p["b"]) ** 2).mean()


def trained(opt: Any, taken: Any, around: Any, x: Any = X) -> Any:
    value_and_grad = crossshard.value_and_grad if hasattr(opt, "inner") else jax.value_and_grad

    @jax.jit
    @around
    def step(params: Any, state: Any, x: Any) -> Any:
        loss = loss_of(x)
        value, gradients = value_and_grad(loss)(params)
        more = taken(loss, value, gradients)
        updates, state = opt.update(gradients, state, params, **more)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda p: jnp.asarray(p, x.dtype), PARAMS)
    state = opt.init(params)
    for _ in range(3):
        params, state = step(params, state, x)
    return params


def traced(*given: Any) -> None:
    """The same without running it, since shards that take other branches wait for each other."""
    jax.eval_shape(lambda: trained(*given))


def on_shards(check_vma: bool) -> Any:
    specs = {"in_specs": (P(), P(), P("shards")), "out_specs": P()}
    return jax.shard_map(mesh=MESH, check_vma=check_vma, **specs)


def anywhere(step: Any) -> Any:
    return step


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", TAKEN)
def test_they_are_refused_where_shards_have_other_rows(name: str, check_vma: bool):
    opt, taken = TAKEN[name]
    wrapped = CrossShardOptimizer(opt)
    with pytest.raises(ArgumentError, match=rf"^{name} is a function.*under jax\.jit"):
        traced(wrapped, taken, on_shards(check_vma))


@pytest.mark.parametrize("name", TAKEN)
def test_on_global_arrays_they_see_all_rows(name: str):
    opt, taken = TAKEN[name]
    # A line search divides by differences, which in float32 are mostly rounding.
    with jax.enable_x64(True):
        rows = jax.device_put(np.float64(X), jax.NamedSharding(MESH, P("shards")))
        found = trained(CrossShardOptimizer(opt), taken, anywhere, rows)
        assert_close(found, trained(opt, taken, anywhere, np.float64(X)))
