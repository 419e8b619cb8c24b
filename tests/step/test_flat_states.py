"""A step returns a state as leaves; its trees are made when somebody reads one."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard.errors import ArgumentError
from crossshard.model.state import is_unread

ROWS = jnp.arange(16, dtype=jnp.float32).reshape(8, 2)


def loss_of_module(model: nnx.Linear, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def loss_of_dict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["kernel"] + params["bias"]) ** 2)


def module_step(**options: object) -> crossshard.TrainStep:
    return crossshard.make_train_step(loss_of_module, optax.adam(0.1), num_shards=4, **options)


def module() -> nnx.Linear:
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def test_a_loop_reads_no_tree_and_compiles_once():
    step = module_step()
    state = step.init(module())
    for _ in range(3):
        state, _ = step(state, ROWS)
        assert is_unread(state)
    assert int(state.step) == 3
    assert is_unread(state)
    # A state that somebody reads, and one of another step, run in the same program.
    jax.block_until_ready(state.params)
    assert not is_unread(state)
    state, _ = step(state, ROWS)
    another = module_step()
    taken, _ = another(another.init(module()), ROWS)
    step(taken, ROWS)
    assert step._program._compiled._cache_size() == 1


def test_what_is_written_to_a_variable_of_a_state_counts():
    step = module_step()
    state, _ = step(step.init(module()), ROWS)
    state.params["kernel"].set_value(jnp.zeros((2, 3)))
    state.params["bias"].set_value(jnp.full(3, 2.0))
    _, metrics = step(state, ROWS)
    assert float(metrics["loss"]) == 4


def test_a_state_is_copied_and_kept_like_any_other():
    step = crossshard.make_train_step(loss_of_dict, optax.adam(0.1), num_shards=4)
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
    state, _ = step(step.init(params), ROWS)
    expected = jax.device_get(step.unshard(state))

    for made in (
        copy.copy(step(step.init(params), ROWS)[0]),
        dataclasses.replace(step(step.init(params), ROWS)[0], grouped=False),
        pickle.loads(pickle.dumps(jax.device_get(step(step.init(params), ROWS)[0]))),
    ):
        assert jax.tree.structure(made) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(made), expected)
    unread, _ = step(step.init(params), ROWS)
    assert not hasattr(unread, "parameters")
    assert is_unread(unread)


def test_a_lowered_step_takes_a_state_and_names_its_arrays():
    step = module_step()
    lowered = step.lower(step.abstract_init(module()), jax.ShapeDtypeStruct((8, 2), jnp.float32))
    assert "state.params['kernel'].value" in lowered.as_text(debug_info=True)
    compiled = lowered.compile()
    (types, _), _ = compiled.args_info
    assert types.params["kernel"].get_value().shape == (2, 3)
    rows = jax.device_put(ROWS, compiled.input_shardings[0][1])
    after, metrics = compiled(step.init(module()), rows)
    same, expected = step(step.init(module()), rows)
    assert float(metrics["loss"]) == float(expected["loss"])
    jax.tree.map(np.testing.assert_array_equal, after, same)


def test_a_batch_that_shares_the_count_of_an_unread_state_is_refused():
    step = crossshard.make_train_step(
        lambda w, batch: (w * batch["x"]).mean() + 0 * batch["n"],
        optax.sgd(0.1),
        num_shards=1,
        batch_axis={"x": 0, "n": None},
    )
    state, _ = step(step.init(jnp.float32(3)), {"x": jnp.ones(2), "n": 0})
    assert is_unread(state)
    with pytest.raises(ArgumentError, match=r"batch\['n'\] shares its buffer with state\.step"):
        step(state, {"x": jnp.ones(2), "n": state.step})
