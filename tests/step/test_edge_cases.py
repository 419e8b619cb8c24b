"""Edge cases of a whole step: each is right, or refused by name."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError
from tests.step.common import assert_close, sgd_step, train

_rng = np.random.default_rng(0)
START = {"a": np.float32(_rng.normal(size=(64, 64))), "b": np.float32(_rng.normal(size=1025))}
X = np.float32(_rng.normal(size=(8, 64)))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    first = (jnp.tanh(batch @ params["a"]) ** 2).mean() * 10
    return first + (jnp.sin(params["b"]) ** 2).mean() * 100 * batch[:, 0].mean()


@functools.cache
def trained(rule: Any, steps: int = 2, **kwargs: Any) -> Any:
    step = make_train_step(loss_fn, rule, num_shards=8, **kwargs)
    return jax.device_get(train(step, step.init(START), [X] * steps).params)


def leafwise(function: Any) -> Any:
    return optax.GradientTransformation(
        lambda params: (), lambda g, s, p=None: (jax.tree.map(function, g), s)
    )


def _longest(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(abs(a) > abs(b), a, b)


def test_one_group_of_all_shards_in_any_order_is_no_group():
    rule = optax.sgd(0.1)
    grouped = CrossShardOptimizer(rule, group_assignment=[[3, 1, 2, 0, 7, 6, 5, 4]])
    found = trained(grouped, weight_update="sharded")
    assert_close(found, trained(rule, weight_update="replicated"))


@pytest.mark.parametrize(
    ("wrapped", "options", "said"),
    [
        (
            {"group_assignment": [[0, 1], [2, 3]]},
            {},
            "on each shard, each group's own",
        ),
        ({}, {"sync_every": 2}, "on each shard, each worker's own"),
        ({"reduction": "sum"}, {}, "a mean over the rows; summed over the shards, its gradient is"),
    ],
    ids=["groups", "workers", "sum"],
)
def test_a_description_says_what_is_not_as_on_one_device(
    wrapped: dict[str, Any], options: dict[str, Any], said: str
):
    loss = lambda w, x: ((x @ w) ** 2).mean()
    step = make_train_step(
        loss, CrossShardOptimizer(optax.sgd(0.1), **wrapped), num_shards=4, **options
    )
    state = step.init(np.ones((64, 20), np.float32))
    step.lower(state, X)
    assert said in step.describe()


def _window(g: jax.Array) -> jax.Array:
    return -lax.reduce_window(g, np.float32(0), _longest, (3,) * g.ndim, (1,) * g.ndim, "SAME")


def test_a_rule_that_mixes_places_is_not_taken_for_elementwise():
    rule = leafwise(_window)
    step = make_train_step(loss_fn, rule, num_shards=8, weight_update="sharded")
    step.abstract_init(START)
    assert "the update is elementwise" not in step.describe()
    assert "`a` (shard 0)" in step.describe()
    assert_close(trained(rule, weight_update="sharded"), trained(rule, weight_update="replicated"))


def test_rules_that_print_and_rules_that_assert_shapes_work():
    def printing(g: Any) -> Any:
        jax.debug.callback(lambda: None)
        return -0.1 * g

    def exact(g: Any, s: Any, p: Any = None) -> Any:
        if g["a"].shape != (64, 64):
            raise AssertionError(g["a"].shape)
        return jax.tree.map(lambda x: -0.1 * x, g), s

    for rule in (leafwise(printing), optax.GradientTransformation(lambda p: (), exact)):
        assert_close(trained(rule, weight_update="sharded"), trained(optax.sgd(0.1)))


def test_states_of_other_groups_are_refused():
    def make(number: int, groups: Any) -> Any:
        rule = CrossShardOptimizer(optax.sgd(0.1), group_assignment=groups)
        return make_train_step(loss_fn, rule, num_shards=number)

    eight, four = make(8, [[0, 1, 2, 3], [4, 5, 6, 7]]), make(4, [[0, 1], [2, 3]])
    plain = make(4, None)
    state = eight.unshard(eight.init(START))
    with pytest.raises(ArgumentError, match="groups over another number of shards"):
        four.reshard(state)
    with pytest.raises(ArgumentError, match="with groups that diverge"):
        plain.reshard(state)
    with pytest.raises(ArgumentError, match="without groups that diverge"):
        four.reshard(plain.unshard(plain.init(START)))


def test_settings_of_modules_in_a_list_are_not_trained():
    modules = [eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Dropout(0.5)]
    step = make_train_step(
        lambda p, b, rng: (p[1](jax.vmap(p[0])(b), key=rng) ** 2).mean(),
        optax.adamw(0.1, weight_decay=0.1),
        num_shards=4,
    )
    state, _ = step(step.init(modules), np.ones((8, 4), np.float32))
    assert step.model(state)[1].p == 0.5
    step = sgd_step(lambda p, b: p * b.mean(), 0.1, 4)
    state, _ = step(step.init(2.0), np.ones(4, np.float32))
    np.testing.assert_allclose(state.params, 1.9)


def test_a_weight_that_is_nan_shows():
    weight = lambda b: b["mask"].sum()
    step = sgd_step(lambda p, b: (p * b["x"]).mean(), 0.1, 4, weight=weight, loss_over="shard")
    batch = {"x": np.ones(4, np.float32), "mask": np.array([1, np.nan, 1, 1], np.float32)}
    state, metrics = step(step.init(jnp.float32(1)), batch)
    assert np.isnan(metrics["loss"])
    assert np.isnan(state.params)


def test_a_state_that_was_used_is_refused_and_its_model_stays():
    step = sgd_step(lambda p, b: (p["w"] * b).mean() * p["n"].sum(), 0.1, 4)
    x = np.ones((8, 3), np.float32)
    state = step.init({"w": np.ones(3, np.float32), "n": np.arange(3)})
    model = step.model(state)
    step(state, x)
    np.testing.assert_array_equal(model["n"], np.arange(3))
    np.testing.assert_array_equal(model["w"], np.ones(3))
    for call in (lambda: step(state, x), lambda: step.unshard(state), lambda: step.model(state)):
        with pytest.raises(ArgumentError, match="has been used"):
            call()


def test_a_padded_batch_may_hold_keys():
    def loss(params: Any, batch: Any) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.normal(key))(batch["key"])
        return (params * noise * batch["mask"]).sum() / batch["mask"].sum()

    step = sgd_step(loss, 0.1, 4, weight="mask")
    keys = jax.random.split(jax.random.key(0), 7)
    batch = {"key": keys, "mask": np.ones(7, np.float32)}
    _, metrics = step(step.init(jnp.float32(1)), batch)
    expected = jax.vmap(lambda key: jax.random.normal(key))(keys).mean()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


def test_settings_of_another_type_are_another_program():
    step = sgd_step(lambda m, b: (m["w"] * b).mean() * (2 if m["k"] is True else 1), 0.0, 2)
    one, true = (step.init({"w": np.ones(3, np.float32), "k": k}) for k in (1, True))
    x = np.ones((4, 3), np.float32)
    assert float(step(one, x)[1]["loss"]) == 1
    assert float(step(true, x)[1]["loss"]) == 2
