"""What the compiled steps send: exactly what N shards must, in few collectives, never in a loop."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import make_train_step
from crossshard.errors import CommunicationError
from crossshard.testing import assert_communication
from tests.quick import deep, deep_but
from tests.step.common import assert_close, on_one_device

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


@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
@pytest.mark.parametrize("rule", deep_but(["sgd", "clip + adam"], RULES))
def test_a_step_sends_the_lower_bound(rule: str, weight_update: str):
    report = assert_communication(lowered(RULES[rule], weight_update))
    assert report.ratio == pytest.approx(1, abs=1e-4)
    assert report.shards == SHARDS
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))
    assert report.parameter_bytes == whole
    assert len([each for each in report.collectives if each.bytes_sent]) <= LEAVES + 2
    kinds = {each.kind for each in report.collectives if each.bytes_sent}
    sharded = {"reduce-scatter", "all-gather", "all-reduce"}
    assert kinds <= ({"all-reduce"} if weight_update == "replicated" else sharded)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_the_small_arrays_of_a_step_travel_together(rule: str):
    small = jax.tree.map(lambda x: x[:16, :16] if x.ndim > 1 else x[:16], PARAMS)
    loss = lambda p, b: sum((b[:, :16] @ w["kernel"] + w["bias"]).std() for w in p.values())
    step = make_train_step(loss, RULES[rule], num_shards=SHARDS)
    report = assert_communication(step, step.abstract_init(small), BATCH)
    assert [each.kind for each in report.collectives] == ["all-reduce"]


@pytest.mark.parametrize("rule", ["sgd", deep("adamw")])
def test_many_arrays_of_one_shape_travel_in_buckets_of_their_own(rule: str):
    rng = np.random.default_rng(0)
    params = [np.float32(rng.normal(size=(8, 144))) for _ in range(41)]
    batch = np.float32(rng.normal(size=(16, 8)) + np.linspace(-1, 1, 16)[:, None])
    loss = lambda p, b: sum((i + 1) * jnp.tanh(b @ w).mean() for i, w in enumerate(p))
    step = make_train_step(loss, RULES[rule], num_shards=SHARDS, weight_update="sharded")
    report = assert_communication(step, step.abstract_init(params), batch)
    kinds = [each.kind for each in report.collectives if each.kind != "all-reduce"]
    # Four of ten arrays, and one of the array that is left.
    assert Counter(kinds) == {"reduce-scatter": 5, "all-gather": 5}
    state, _ = step(step.init(params), batch)
    assert_close(state.params, on_one_device(loss, RULES[rule], params, [batch])[0], 1e-5)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_loss_is_computed_before_the_gradients_of_its_bucket(rule: str):
    # Fused with them, XLA for GPUs kept a language model's logits for most of the backward pass.
    text = lowered(RULES[rule], "replicated").as_text()
    assert re.findall(r"stablehlo.optimization_barrier %\w+ : (.*)", text) == ["tensor<f32>"]


def test_the_sharded_step_needs_less_memory_by_the_state_it_saves():
    replicated, sharded = (
        crossshard.inspect(lowered(RULES["adamw"], word)) for word in ("replicated", "sharded")
    )
    in_parts = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS) if leaf.ndim > 1)
    saved = 2 * in_parts * (SHARDS - 1) // SHARDS
    assert replicated.memory.peak - sharded.memory.peak >= saved
    assert sharded.memory.temp <= replicated.memory.temp


def test_buffers_of_the_state_are_used_again():
    for weight_update in ("replicated", "sharded"):
        memory = crossshard.inspect(lowered(RULES["adamw"], weight_update)).memory
        # All but the metrics.
        assert memory.output - memory.alias < 4096


def test_a_second_reduction_is_caught():
    def again(params: Any, batch: Any) -> jax.Array:
        summed = jax.tree.map(_summed_again, params)
        return loss_fn(summed, batch)

    with pytest.raises(CommunicationError, match=r"all-reduce"):
        assert_communication(lowered(RULES["sgd"], "sharded", again))


@jax.custom_vjp
def _summed_again(x: jax.Array) -> jax.Array:
    return x


_summed_again.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.pmean(g, "shards"),))


def test_a_reduction_in_a_loop_is_caught():
    def looping(params: Any, batch: Any) -> jax.Array:
        def body(total: Any, part: Any) -> Any:
            return total + loss_fn(jax.tree.map(_summed_again, params), part[None]), None

        return jax.lax.scan(body, jnp.float32(0), batch)[0]

    with pytest.raises(CommunicationError, match=r"loop"):
        assert_communication(lowered(RULES["sgd"], "sharded", looping), max_bytes_ratio=100)


def test_the_users_own_step_is_read_alike():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    opt = optax.adam(1e-3)
    spec = jax.sharding.PartitionSpec

    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.lax.pmean(jax.grad(loss_fn)(params, batch), "x")
        updates, state = opt.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(spec(), spec(), spec("x")), out_specs=spec(), check_vma=False
        )
    )
    report = assert_communication(run, PARAMS, opt.init(PARAMS), BATCH)
    assert report.ratio == pytest.approx(1)
