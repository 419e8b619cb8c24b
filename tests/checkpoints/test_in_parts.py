"""Checkpoints of sharded parameters: to and from every other placement."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from crossshard import Checkpoints, make_train_step
from tests.quick import deep_but
from tests.step.common import assert_close, assert_same, train
from tests.step.test_state_in_parts import (
    BATCHES,
    EVERY,
    PARAMS,
    PLACEMENTS,
    RESTS,
    bits,
    largest_piece,
    loss_fn,
    made,
    mesh_of,
    specs_of,
    step_of,
)

MASTERS = {"master_dtype": "float32"}
HALVES = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), PARAMS)


@pytest.mark.parametrize("optimizer", deep_but(["sgd"], ["sgd", "adamw"]))
@pytest.mark.parametrize("masters", deep_but([True], [False, True]))
@pytest.mark.parametrize("other", deep_but(["4 with a sharded update", "3 in parts"], PLACEMENTS))
def test_it_comes_back_in_every_placement_bit_for_bit(
    other: str, masters: bool, optimizer: str, tmp_path: Path
):
    number, placement = PLACEMENTS[other]
    options, params = (EVERY | MASTERS, HALVES) if masters else (EVERY, PARAMS)
    step, there = (
        step_of(4, optimizer, **options),
        step_of(number, optimizer, **options, **placement),
    )
    state = train(step, step.init(params), BATCHES[:2])
    with Checkpoints(tmp_path / "one", step) as checkpoints:
        checkpoints.save(state, {"at": 2})
    moved, data = Checkpoints(tmp_path / "one", there).restore_latest(there.abstract_init(params))
    assert data == {"at": 2}
    assert bits(there, moved) == bits(step, state)
    with Checkpoints(tmp_path / "other", there) as checkpoints:
        checkpoints.save(moved)
    back, _ = Checkpoints(tmp_path / "other", step).restore(step.abstract_init(params), 2)
    assert bits(step, back) == bits(step, state)
    assert specs_of(back.params) == RESTS
    # On as many shards it goes on bit for bit.
    assert_same(train(step, back, BATCHES[2:]).params, train(step, state, BATCHES[2:]).params)


def buffers_of(state: Any) -> set[int]:
    pieces = (piece.data for x in jax.tree.leaves(state) for piece in x.addressable_shards)
    return {piece.unsafe_buffer_pointer() for piece in pieces if piece.nbytes > 1024}


def test_a_restore_makes_no_whole_copies_and_what_it_makes_is_donated(tmp_path: Path):
    step = step_of(4, "adamw", ema=0.9)
    state = train(step, step.init(PARAMS), BATCHES[:2])
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state)
        before = jax.live_arrays()
        restored, _ = checkpoints.restore_latest(step.abstract_init(PARAMS))
        assert largest_piece(before) == PARAMS["layers"].nbytes // 4
    # Arrays that share memory with a reader would be copied instead (jax#18617).
    buffers = buffers_of(restored)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after, _ = step(restored, BATCHES[2])
    large = [x for x in jax.tree.leaves(restored) if x.nbytes > 4096]
    assert len(large) == 12
    assert all(x.is_deleted() for x in large)
    assert buffers_of(after) == buffers
    assert_same(after.params, train(step, state, BATCHES[2:]).params)


def test_parts_beside_a_model_axis_come_back_with_another_split(tmp_path: Path):
    specs = {"layers": P(None, None, "model"), "out": P(None, "model")}
    meshes = [mesh_of(4, "data", "model"), mesh_of(2, "data", "model")]
    one, other = (
        make_train_step(
            loss_fn, optax.adam(1e-2), mesh=mesh, axis_name="data", params="sharded", ema=0.9
        )
        for mesh in meshes
    )
    state = train(one, one.init(made(meshes[0], specs)), BATCHES[:2])
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(state)
    like = other.abstract_init(made(meshes[1], specs))
    moved, _ = Checkpoints(tmp_path, other).restore_latest(like)
    assert bits(other, moved) == bits(one, state)
    assert moved.params["layers"].sharding.spec == P(None, "data", "model")
    alone = make_train_step(loss_fn, optax.adam(1e-2), num_shards=1, ema=0.9)
    whole, _ = Checkpoints(tmp_path, alone).restore_latest(alone.abstract_init(PARAMS))
    after = train(other, moved, BATCHES[2:])
    assert_close(after.params, train(alone, whole, BATCHES[2:]).params, 2e-6)


def test_parameters_alone_come_in_parts(tmp_path: Path):
    step, other = step_of(4, "adamw"), step_of(2, "sgd")
    state = train(step, step.init(PARAMS), BATCHES[:1])
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state)
    tuned = other.init(jax.tree.map(np.zeros_like, PARAMS))
    tuned = Checkpoints(tmp_path, other).restore_params(tuned)
    assert specs_of(tuned.params) == RESTS
    assert_same(tuned.params, state.params)
