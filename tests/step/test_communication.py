"""What the compiled steps send: exactly what N shards must, in few collectives, never in a loop."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import make_train_step
from tests.quick import deep

SHARDS = 8
# Eight matrices that travel alone, and biases that share a bucket.
PARAMS = {
    f"layer{i}": {"kernel": np.zeros((128, 256), np.float32), "bias": np.zeros(256, np.float32)}
    for i in range(8)
}
LEAVES = 16
BATCH = jax.ShapeDtypeStruct((16, 128), jnp.float32)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = batch
    for layer in params.values():
        hidden = jnp.tanh(hidden @ layer["kernel"] + layer["bias"])[:, :128]
    return (hidden**2).mean()


def lowered(rule: Any, weight_update: str, loss: Any = loss_fn, **kwargs: Any) -> Any:
    step = make_train_step(loss, rule, num_shards=SHARDS, weight_update=weight_update, **kwargs)
    return step.lower(step.abstract_init(PARAMS), BATCH)


RULES = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(1e-3),
    "lamb": optax.lamb(1e-3),
    "clip + adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}
# LAMB takes two norms of each leaf; clipping adds those of the matrices, the biases are whole.
SUMS = {"sgd": 0, "adamw": 0, "lamb": 2 * LEAVES, "clip + adam": LEAVES // 2}


@pytest.mark.parametrize(
    ("rule", "weight_update"),
    [("sgd", "replicated"), *map(deep, (("clip + adam", "sharded"), ("lamb", "sharded")))],
)
def test_a_step_sends_the_lower_bound(rule: str, weight_update: str):
    report = crossshard.inspect(lowered(RULES[rule], weight_update))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))
    # Beside the gradients, the loss is summed, and what a sharded update reads of whole arrays.
    scalars = 1 + (SUMS[rule] if weight_update == "sharded" else 0)
    assert report.ratio == pytest.approx(1 + 4 * scalars / whole, abs=1e-7)
    assert report.shards == SHARDS
    assert report.parameter_bytes == whole
    assert len([each for each in report.collectives if each.bytes_sent]) <= LEAVES + 2
    kinds = {each.kind for each in report.collectives if each.bytes_sent}
    sharded = {"reduce-scatter", "all-gather", "all-reduce"}
    assert kinds <= ({"all-reduce"} if weight_update == "replicated" else sharded)


def test_the_small_arrays_of_a_step_travel_together():
    small = jax.tree.map(lambda x: x[:16, :16] if x.ndim > 1 else x[:16], PARAMS)
    loss = lambda p, b: sum(((b[:, :16] @ w["kernel"] + w["bias"]) ** 2).mean() for w in p.values())
    step = make_train_step(loss, RULES["sgd"], num_shards=SHARDS)
    report = crossshard.inspect(step.lower(step.abstract_init(small), BATCH))
    assert [each.kind for each in report.collectives] == ["all-reduce"]


def test_a_loss_is_computed_before_the_gradients_of_its_bucket():
    # Fused with them, XLA for GPUs kept a language model's logits for most of the backward pass.
    text = lowered(RULES["sgd"], "replicated").as_text()
    assert re.findall(r"stablehlo.optimization_barrier %\w+ : (.*)", text) == ["tensor<f32>"]
