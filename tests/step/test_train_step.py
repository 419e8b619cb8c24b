"""make_train_step: rules that read more, keys, and the compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import make_train_step
from tests.harness import BATCHES, LINEAR, mlp
from tests.quick import deep
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
