"""Arrays without elements, in parameters and in what an optimizer keeps, go into no shard_map."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard.jaxprs.walk import equations_of
from tests.quick import deep
from tests.step.common import assert_close, on_one_device, train

BATCH = {"x": np.float32(np.random.default_rng(0).normal(size=(16, 12)))}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return (
        ((hidden @ params["out"] - 1) ** 2).mean() + params["none"].sum() + params["b"].sum() ** 2
    )


def params_of() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    made = {"in": (12, 24), "out": (24, 8), "b": (8,), "none": (0,)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in made.items()}


@pytest.mark.parametrize(
    ("optimizer", "place", "virtual", "shards"),
    [
        deep((optax.sgd(0.1), {"weight_update": "sharded"}, 8, 2)),
        (optax.contrib.muon(1e-2), {"params": "sharded"}, None, 2),
    ],
)
def test_a_step_trains_as_one_device_and_passes_none(
    optimizer: Any, place: Any, virtual: int | None, shards: int
):
    step = crossshard.make_train_step(
        loss_fn, optimizer, num_shards=shards, virtual_shards=virtual, **place
    )
    state = step.init(params_of())
    jaxpr = step.trace(state, BATCH).jaxpr
    mapped = [each for each in equations_of(jaxpr) if each.primitive.name == "shard_map"]
    assert mapped
    assert all(atom.aval.size for each in mapped for atom in each.invars)
    found = step.model(train(step, state, [BATCH] * 2))
    assert_close(found, on_one_device(loss_fn, optimizer, params_of(), [BATCH] * 2)[0], 2e-5)


@pytest.mark.parametrize("others", [1, 3])
def test_a_run_goes_on_from_a_checkpoint(others: int, tmp_path: Path):
    made = lambda shards: crossshard.make_train_step(
        loss_fn, optax.sgd(0.1, momentum=0.9), num_shards=shards, params="sharded"
    )
    step, other, batch = made(2), made(others), {"x": np.tile(BATCH["x"], (3, 1))}
    state = train(step, step.init(params_of()), [batch])
    with crossshard.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state)
    checkpoints = crossshard.Checkpoints(tmp_path, other)
    found = checkpoints.restore_latest(other.abstract_init(params_of()))
    assert found is not None
    assert found[0].params["none"].shape == (0,)
    of_params = checkpoints.restore_params(other.init(params_of()))
    assert_close(of_params.params, found[0].params)
    assert_close(train(other, found[0], [batch]).params, train(step, state, [batch]).params)
