"""Arrays of one batch have as many rows, or are named as whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import crossshard
from crossshard import make_train_step
from crossshard.errors import ArgumentError

BATCH = {"x": np.ones((32, 4), np.float32), "class_weight": np.arange(16, dtype=np.float32)}
W = np.ones(4, np.float32)


def loss_fn(w: Any, batch: Any) -> jax.Array:
    return (batch["x"] @ w).mean() * batch["class_weight"].sum()


@pytest.mark.parametrize("weight", [None, lambda batch: batch["x"].shape[0]])
def test_a_table_among_the_rows_is_refused_or_named(weight: Any):
    step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=8, weight=weight)
    batch = jax.device_put(BATCH, NamedSharding(step.mesh, PartitionSpec("shards")))
    state = step.init(W)
    names = r"\['class_weight'\] has 16, and batch\['x'\] 32\..*replicated_entries.*\[16, 2, …\]"
    for call in (step, step.lower, jax.jit(lambda state, batch: step(state, batch))):
        with pytest.raises(ArgumentError, match=names):
            call(state, batch)
    whole = make_train_step(
        loss_fn, optax.sgd(0.1), num_shards=8, replicated_entries=["class_weight"]
    )
    assert whole(whole.init(W), BATCH)[1]["loss"] == loss_fn(W, BATCH)


def of_shard(x: Any, table: Any) -> Any:
    return (x * table.sum()).sum()


def test_a_runner_splits_arrays_of_one_length_unless_told_otherwise():
    x, table = BATCH["x"], BATCH["class_weight"]
    names = r"input 0 and input 1 .*32 and 16.*input_shard_axes"
    with pytest.raises(ArgumentError, match=names):
        crossshard.shard(of_shard, [x, table], num_shards=8)
    with pytest.raises(ArgumentError, match=names):
        crossshard.nnx.batch_parallel(of_shard, [x, table], num_shards=8)
    with pytest.raises(ArgumentError, match=r"input 0 and input 'table'"):
        crossshard.shard(num_shards=8)(of_shard)(x, table=table)
    of_batch = lambda batch: of_shard(batch["x"], batch["class_weight"])
    with pytest.raises(ArgumentError, match=r"input 0\['class_weight'\] and input 0\['x'\]"):
        crossshard.shard(of_batch, [BATCH], num_shards=8, input_shard_axes=[0])
    found = crossshard.shard(of_shard, [x, table], num_shards=8, input_shard_axes=[0, None])
    np.testing.assert_allclose(jnp.sum(found), (x * table.sum()).sum())
    # One of them per shard, as keys are: that is said by its axis.
    each = crossshard.shard(
        lambda x, own: x.sum() * own.sum(), [x, jnp.arange(8.0)], 8, input_shard_axes=[0, 0]
    )
    np.testing.assert_allclose(each, 16 * np.arange(8))


def test_inputs_may_have_rows_of_their_own():
    # Rows to train on and rows to validate on, as TensorFlow's model functions get them.
    train, validation = np.arange(64.0), {"x": np.arange(32.0), "y": np.ones(32)}
    of_shard = lambda train, other: jnp.stack([train.sum(), (other["x"] ** 2).sum()])[None]
    found = crossshard.shard(of_shard, [train, validation], 8, input_shard_axes=[0, 0])
    x = validation["x"]
    each = np.stack([train.reshape(8, 8).sum(1), (x**2).reshape(8, 4).sum(1)], 1)
    np.testing.assert_allclose(found, each)
    validation["y"] = np.ones(16)  # below one axis there are equally many
    with pytest.raises(ArgumentError, match=r"input 1\['x'\] and input 1\['y'\].*32 and 16"):
        crossshard.shard(of_shard, [train, validation], 8, input_shard_axes=[0, 0])
