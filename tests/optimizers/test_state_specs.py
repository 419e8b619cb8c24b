"""state_specs takes the axes of the shards from the call, the optimizer or the mesh in sight."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentError, AxisError

PARAMS = {"w": np.ones((64, 32), np.float32)}


def mesh_of(**axes: int) -> Any:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def optimizer(**options: Any) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.trace(0.9), weight_update="sharded", **options)


def spec_of(opt: Any, *args: Any) -> Any:
    return opt.state_specs(*args).inner_state.trace["w"]


def test_a_mesh_whose_axis_has_another_name():
    mesh = mesh_of(data=8)
    placed = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        assert spec_of(optimizer(), PARAMS, 8) == P("data")
    assert spec_of(optimizer(), placed, 8) == P("data")
    assert spec_of(optimizer(axis_name="data"), PARAMS, 8) == P("data")
    assert spec_of(optimizer(), PARAMS, 8, "data") == P("data")
    assert spec_of(optimizer(), PARAMS, 8) == P("shards")
    opt = optimizer()
    specs = opt.state_specs(placed, 8)
    run = jax.shard_map(opt.init, mesh=mesh, in_specs=P(), out_specs=specs)
    assert jnp.shape(jax.jit(run)(placed).inner_state.trace["w"]) == (64, 32)


def test_several_axes():
    assert spec_of(
        optimizer(), jax.device_put(PARAMS, NamedSharding(mesh_of(a=2, b=4), P())), 8
    ) == P(("a", "b"))
    placed = jax.device_put(PARAMS, NamedSharding(mesh_of(data=4, model=2), P()))
    with pytest.raises(AxisError, match=r"'data': 4, 'model': 2.*the 4 shards. Pass axis_name="):
        optimizer().state_specs(placed, 4)
    named = jax.device_put(PARAMS, NamedSharding(mesh_of(shards=4, model=2), P()))
    assert spec_of(optimizer(), named, 4) == P("shards")


def test_groups_have_no_scalar_parameters():
    opt = CrossShardOptimizer(optax.trace(0.9), group_assignment=[[0, 1], [2, 3]])
    with pytest.raises(ArgumentError, match=r"`w` is a scalar, of which shard_map keeps one"):
        opt.state_specs({"w": np.float32(1)}, 4)
    together = CrossShardOptimizer(optax.trace(0.9), group_assignment=[[0, 1, 2, 3]])
    assert together.state_specs({"w": np.float32(1)}, 4).inner_state.trace["w"] == P()
