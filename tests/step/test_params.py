"""What init takes for parameters: what is not meant to be trained, or is sharded, is refused."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard import make_train_step
from crossshard.errors import ArgumentError
from tests.step.common import assert_close, sgd_step

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return (model(batch) ** 2).mean()


# NNX states.


def test_a_state_of_params_is_a_pytree_of_parameters():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    expected = jax.tree.map(
        lambda p, g: p - 0.1 * g,
        nnx.to_pure_dict(params),
        nnx.to_pure_dict(nnx.grad(loss_fn)(model, X)),
    )
    step = sgd_step(lambda params, batch: loss_fn(nnx.merge(graphdef, params), batch), 0.1, 4)
    state, _ = step(step.init(params), X)
    trained = step.model(state)
    assert isinstance(trained, nnx.State)
    assert_close(nnx.to_pure_dict(trained), expected, 1e-6, 1e-5)


# Linen.


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))


ONES = jnp.ones(3)
TRAIN_STATE = train_state.TrainState.create(apply_fn=None, params=ONES, tx=optax.sgd(0.1, 0.9))
NOT_TRAINED: dict[str, tuple[Any, str]] = {
    "statistics": (
        Normed().init(jax.random.key(0), X),
        r"train \['batch_stats'\].*model_state='mean'",
    ),
    "Equinox": (
        eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch"),
        r"eqx\.nn\.State",
    ),
    "a train state": (TRAIN_STATE, r"init\(state\.params\)"),
    "momentum": ({"params": ONES, "opt": TRAIN_STATE.opt_state}, "optimizer state"),
    "Adam": ({"params": ONES, "opt": optax.adam(0.1).init(ONES)}, "optimizer state"),
}


@pytest.mark.parametrize("name", NOT_TRAINED)
def test_what_is_not_trained_is_refused_among_the_parameters(name: str):
    params, said = NOT_TRAINED[name]
    step = make_train_step(lambda params, x: x.mean(), optax.adamw(0.1), num_shards=2)
    with pytest.raises(ArgumentError, match=said):
        step.init(params)


# Other axes than the shard axes.


def two_axes() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


W = np.ones((64, 4), np.float32)
ROWS = np.ones((8, 64), np.float32)


def matmul(w: Any, batch: Any) -> jax.Array:
    return ((batch @ w) ** 2).mean()


@pytest.mark.parametrize("spec", [P(None, "model"), P(("data", "model")), P("data")])
def test_parameters_that_lie_split_are_refused(spec: P):
    mesh = two_axes()
    step = make_train_step(matmul, optax.sgd(0.1), mesh=mesh)
    for params in ({"w": W}, [W]):
        split = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), params)
        with pytest.raises(
            ArgumentError, match=r"params\[('w'|0)\] is sharded.*params='sharded'.*axis_name="
        ):
            step.init(split)
        with pytest.raises(ArgumentError, match=r"params\[('w'|0)\] is sharded"):
            step.abstract_init(split)
    step.init(jax.device_put(W, NamedSharding(mesh, P())))


def _constrained(sharding: Any) -> Any:
    return lambda w, batch: matmul(jax.lax.with_sharding_constraint(w, sharding), batch)


OVER_MODEL = P(None, "model")


def _mapped(w: Any, batch: Any) -> jax.Array:
    run = jax.shard_map(
        matmul, mesh=two_axes(), in_specs=(OVER_MODEL, P()), out_specs=P(), check_vma=False
    )
    return run(w, batch)


@pytest.mark.parametrize(
    ("loss", "mesh"),
    [
        (_constrained(NamedSharding(two_axes(), OVER_MODEL)), two_axes()),
        (_constrained(OVER_MODEL), two_axes()),
        (_mapped, two_axes()),
        # No axis of this name.
        (_constrained(OVER_MODEL), Mesh(jax.devices(), ("shards",))),
    ],
)
def test_a_loss_that_shards_arrays_is_refused(loss: Any, mesh: Mesh):
    step = make_train_step(loss, optax.sgd(0.1), mesh=mesh)
    state = step.init(W)
    for call in (step, step.lower):
        with pytest.raises(ArgumentError, match="shards an array over the mesh"):
            call(state, ROWS)


def test_linens_boxes():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
            return nn.Dense(4, kernel_init=init)(x)

    loss = lambda params, batch: (Boxed().apply({"params": params}, batch) ** 2).mean()
    params = Boxed().init(jax.random.key(0), ROWS)["params"]
    step = make_train_step(loss, optax.sgd(0.1), mesh=two_axes())
    with pytest.raises(ArgumentError, match=r"flax\.linen\.unbox\(params\)"):
        step(step.init(params), ROWS)
    _, metrics = step(step.init(nn.unbox(params)), ROWS)
    assert float(metrics["loss"]) == 64.0**2
