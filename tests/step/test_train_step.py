"""make_train_step: groups alone, leaves of every kind, keys, and the compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import make_train_step
from tests.harness import BATCHES, LINEAR, mlp
from tests.quick import deep, deep_but
from tests.step.common import assert_close, on_one_device, sgd_step, train


def trained_by(step: Any) -> Any:
    return train(step, step.init(LINEAR), BATCHES)


def _delayed_sgd(learning_rate: float) -> optax.GradientTransformation:
    """Steps with the gradient of the step before, so that parameters read it from the state."""
    init = lambda params: jax.tree.map(jnp.zeros_like, params)
    scaled = lambda last: jax.tree.map(lambda g: -learning_rate * g, last)
    update = lambda gradients, last, params=None: (scaled(last), gradients)
    return optax.GradientTransformation(init, update)


RULES = {"loss": optax.polyak_sgd(0.5), "gradient from its state": _delayed_sgd(0.1)}


@pytest.mark.parametrize("weight_update", ["replicated", deep("sharded")])
@pytest.mark.parametrize("reads", RULES)
def test_a_rule_that_reads_more_than_the_gradient_steps_as_one_device(
    reads: str, weight_update: str
):
    step = make_train_step(mlp, RULES[reads], num_shards=8, weight_update=weight_update)
    state = step.unshard(trained_by(step))
    want = on_one_device(mlp, RULES[reads], LINEAR, BATCHES, needs_value=reads == "loss")
    assert_close((state.params, state.opt_state.inner_state), want, 1e-5)
    assert int(state.step) == len(BATCHES)


# What lies where.


def test_the_users_arrays_are_copied_and_the_states_buffers_used_again():
    params = jax.tree.map(jnp.asarray, LINEAR)
    step = make_train_step(mlp, optax.adam(0.1), num_shards=8, weight_update="sharded")
    before = step.init(params)
    whole = step.unshard(before)
    after, _ = step(before, BATCHES[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state)))
    for tree in (params, whole, after):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
    assert_close(whole.params, LINEAR, 0)
    # A rule may keep the parameters, of which it has a copy.
    kept = optax.GradientTransformation(lambda params: params, lambda g, s, _=None: (g, s))
    trained_by(make_train_step(mlp, kept, num_shards=2, weight_update="sharded"))


# Leaves of every kind.


def _zoo_loss(params: Any, batch: Any) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    terms = [((leaf.astype(jnp.float32) - 0.1 * i) ** 2).sum() for i, leaf in enumerate(leaves)]
    return sum(terms) * batch.mean()


def _zoo() -> Any:
    rng = np.random.default_rng(3)
    draw = lambda *shape: np.float32(rng.normal(size=shape))
    shared = draw(1031)
    return {
        "scalar": np.float32(3),
        "tiny": draw(5),
        "odd": draw(37, 29),
        "odd3": draw(3, 17, 23),
        "even": draw(64, 17),
        "conv": draw(3, 3, 16, 8),
        "prime": draw(1031),
        "half": jnp.asarray(draw(64, 33), jnp.bfloat16),
        "empty": {},
        "nothing": None,
        "zero": np.zeros((0, 4), np.float32),
        "shared": [shared, shared],
        "whole": np.arange(2000),
        "mask": np.array([True, False]),
    }


_MASK = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
ZOO_RULES = {
    "decay of matrices": optax.adamw(0.1, weight_decay=0.1, mask=_MASK),
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
}


@pytest.mark.parametrize("rule", deep_but(["global norm"], ZOO_RULES))
def test_leaves_of_every_kind(rule: str):
    batch = np.ones(24, np.float32)
    results = []
    for shards, weight_update in ((1, "replicated"), (3, "sharded")):
        step = make_train_step(
            _zoo_loss, ZOO_RULES[rule], num_shards=shards, weight_update=weight_update
        )
        state = step.unshard(train(step, step.init(_zoo()), [batch] * 4))
        model = step.model(state)
        np.testing.assert_array_equal(model["whole"], np.arange(2000))
        np.testing.assert_array_equal(model["mask"], [True, False])
        assert model["half"].dtype == jnp.bfloat16
        assert jax.tree.structure(model) == jax.tree.structure(_zoo())
        own = jax.eval_shape(ZOO_RULES[rule].init, state.params)
        for one, other in zip(
            *map(jax.tree.leaves, (state.opt_state.inner_state, own)), strict=True
        ):
            assert one.dtype == other.dtype
        results.append(jax.tree.map(lambda x: np.asarray(x, np.float64), model))
    assert_close(*results, 1e-5)
    moved = jax.tree.map(
        lambda a, b: np.abs(a - np.asarray(b, float)).max(initial=0), model, _zoo()
    )
    assert max(moved["prime"], moved["odd"]) > 0.01


# What a loss may be.


@pytest.mark.parametrize("number", [1, 4])
def test_keys_differ_between_steps_and_shards_and_come_again(number: int):
    step = sgd_step(
        lambda p, b, rng: (p * b.mean(), jax.random.normal(rng)), 0.1, number, has_aux=True
    )

    def drawn(rng: Any) -> Any:
        state = step.init(jnp.float32(1), rng)
        seen = []
        for _ in range(3):
            state, metrics = step(state, np.ones(4, np.float32))
            seen += metrics["aux"].tolist()
        return seen

    assert len(set(drawn(0))) == 3 * number
    assert drawn(0) == drawn(jax.random.key(0)) == drawn(jax.random.PRNGKey(0))
    assert not set(drawn(0)) & set(drawn(1))


def test_sums_inside_of_the_loss_see_the_shards():
    step = sgd_step(lambda p, b: p * crossshard.cross_replica_sum(b.sum()), 1.0, 4)
    state, metrics = step(step.init(jnp.float32(1)), np.arange(4, dtype=np.float32))
    assert float(metrics["loss"]) == 6
    assert float(state.params) == -5


# The compiled step.


def test_it_is_traced_and_compiled_by_the_first_call_alone():
    count = 0

    def counted(params: Any, batch: Any) -> jax.Array:
        nonlocal count
        count += 1
        return mlp(params, batch)

    step = make_train_step(counted, optax.adam(0.1), num_shards=8, weight_update="sharded")
    state, _ = step(step.init(LINEAR), BATCHES[0])
    # Once to compile it; and with as many rows as the batch has, for the proof.
    assert count == 2
    trained_by(step)
    step(state, BATCHES[1])
    assert count == 2


def test_it_is_lowered_for_types_as_for_arrays():
    step = make_train_step(mlp, optax.adam(0.1), num_shards=8, weight_update="sharded")
    abstract, state = step.abstract_init(LINEAR), step.init(LINEAR)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)
    batch = BATCHES[0]
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    assert step.lower(abstract, types).as_text() == step.lower(state, batch).as_text()


def test_it_is_lowered_for_the_batch_as_it_will_be_padded():
    loss = lambda w, b: ((b["x"] @ w).mean(-1) * b["mask"]).sum() / b["mask"].sum()
    step = sgd_step(loss, 0.1, 8, weight="mask")
    state = step.abstract_init(np.ones((40, 33), np.float32))
    types = {"x": jax.ShapeDtypeStruct((10, 40), np.float32)}
    with pytest.raises(crossshard.errors.ArgumentError, match="names an entry"):
        step.lower(state, types)
    types["mask"] = jax.ShapeDtypeStruct((10,), np.float32)
    assert step.lower(state, types).in_avals[0][1]["x"].shape == (16, 40)


def test_init_traces_the_initial_state_once():
    calls = []

    def init(params: Any) -> Any:
        calls.append(params)
        return jax.tree.map(jnp.zeros_like, params)

    optimizer = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    step = make_train_step(lambda p, b: (p * b).mean(), optimizer, num_shards=4)
    step.init(np.ones(3, np.float32))
    # And once to plan the update.
    assert len(calls) == 2
