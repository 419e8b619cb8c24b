"""What parameters are called where an optimizer reads their names, and in its state."""

import re
from collections.abc import Callable
from typing import Any

import flax
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer, Optimizer
from tests.quick import deep_but

X = np.ones((8, 3), np.float32)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0), bias_init=nnx.initializers.ones)
        self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(1), bias_init=nnx.initializers.ones)


def kernels(model: Net) -> list[nnx.Param]:
    return [model.head.kernel, model.dense.kernel]


def biases(model: Net) -> list[nnx.Param]:
    return [model.dense.bias, model.head.bias]


def no_loss(model: Any, x: Any) -> Any:
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(0 * leaf.sum() for leaf in leaves) + 0 * x.sum()


def by_path(read: Callable[[Any], bool]) -> Callable[[Any], Any]:
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: read(path), params)


def by_key(read: Callable[[Any], bool]) -> Callable[[Any], Any]:
    return lambda params: {key: read(key) for key in params}


MASKS = {
    "the last key": by_path(lambda path: not path[-1].key.endswith("bias")),
    "equality": by_path(lambda path: path[-1].key not in ("dense/bias", "head/bias")),
    "the path as a text": by_path(lambda path: "bias" not in jax.tree_util.keystr(path)),
    "a simple text": by_path(
        lambda path: "bias" not in jax.tree_util.keystr(path, simple=True, separator="/")
    ),
    "str of the path": by_path(lambda path: "bias" not in str(path)),
    "a format": by_path(lambda path: "bias" not in f"{path[-1].key}"),
    "a dict": by_key(lambda key: not key.endswith("bias")),
    "what it contains": by_key(lambda key: "bias" not in key),
    "a regular expression": by_key(lambda key: re.search("bias", key) is None),
    "its parts": by_key(lambda key: key.split("/")[-1] == "kernel"),
    "flax": lambda params: flax.traverse_util.path_aware_map(
        lambda path, _: "bias" not in path[-1], params
    ),
}
of_each_mask = pytest.mark.parametrize("mask", MASKS)


def decaying(mask: Any, kind: Any = CrossShardOptimizer) -> Any:
    """Steps towards zero by a tenth, where the mask says so."""
    return kind(optax.chain(optax.add_decayed_weights(0.1, mask), optax.sgd(1.0)))


WAYS = {
    "the module": lambda model, opt, x: opt.minimize(lambda: no_loss(model, x), var_list=model),
    "all that there is": lambda model, opt, x: opt.minimize(lambda: no_loss(model, x)),
    "a list": lambda model, opt, x: opt.minimize(
        lambda: no_loss(model, x), var_list=[*kernels(model), *biases(model)]
    ),
    "gradients from elsewhere": lambda model, opt, x: opt.apply_gradients(
        [(jnp.zeros_like(v[...]), v) for v in [*kernels(model), *biases(model)]], incoming="local"
    ),
}


@pytest.mark.parametrize(
    ("mask", "way"),
    deep_but(
        lambda case: case[0] in ("a dict", "flax", "str of the path") or case[1] == "a list",
        [(mask, way) for way in WAYS for mask in MASKS],
    ),
)
def test_names_come_from_the_module(mask: str, way: str):
    model, before = Net(), Net()
    crossshard.shard(num_shards=8)(WAYS[way])(model, decaying(MASKS[mask]), X)
    for variable, was in zip(kernels(model), kernels(before), strict=True):
        np.testing.assert_allclose(variable[...], 0.9 * np.asarray(was[...]), rtol=1e-6)
    for variable in biases(model):
        np.testing.assert_array_equal(variable[...], np.ones(variable.shape))


@of_each_mask
@pytest.mark.parametrize("kind", [CrossShardOptimizer, Optimizer])
def test_where_there_is_no_name_a_mask_may_not_read_one(mask: str, kind: Any):
    kernel, bias = nnx.Param(jnp.ones(3)), nnx.Param(jnp.ones(2))
    opt = decaying(MASKS[mask], kind)

    def step(x: Any) -> None:
        opt.minimize(lambda: 0 * (kernel[...].sum() + bias[...].sum()), var_list=[kernel, bias])

    with pytest.raises(crossshard.CrossshardError, match=r"var_list=model.*name='kernel'|Unnamed"):
        crossshard.shard(num_shards=8)(step)(X)
    np.testing.assert_array_equal(kernel[...], np.ones(3))
    assert opt.variables() == []


def test_names_in_the_metadata():
    kernel, bias = nnx.Param(jnp.ones(3), name="kernel"), nnx.Param(jnp.ones(2), name="bias")
    opt = decaying(MASKS["a dict"])

    @crossshard.shard(num_shards=8)
    def step(x: Any) -> None:
        opt.minimize(lambda: 0 * (kernel[...].sum() + bias[...].sum()), var_list=[bias, kernel])

    step(X)
    np.testing.assert_allclose(kernel[...], np.full(3, 0.9), rtol=1e-6)
    np.testing.assert_array_equal(bias[...], np.ones(2))


def test_a_mask_that_reads_shapes_needs_no_names():
    kernel, bias = nnx.Param(jnp.ones((3, 1))), nnx.Param(jnp.ones(2))
    opt = decaying(lambda params: jax.tree.map(lambda x: x.ndim > 1, params))

    @crossshard.shard(num_shards=8)
    def step(x: Any) -> None:
        opt.minimize(lambda: 0 * (kernel[...].sum() + bias[...].sum()), var_list=[bias, kernel])

    step(X)
    np.testing.assert_allclose(kernel[...], np.full((3, 1), 0.9), rtol=1e-6)
    np.testing.assert_array_equal(bias[...], np.ones(2))


def test_labels_by_name():
    opt = CrossShardOptimizer(
        optax.partition(
            {"fast": optax.sgd(1.0), "slow": optax.sgd(0.5, momentum=0.9)},
            lambda params: {key: "fast" if "bias" in key else "slow" for key in params},
        )
    )
    model, before = Net(), Net()

    @crossshard.shard(num_shards=8)
    def step(model: Any, opt: Any, x: Any) -> None:
        opt.minimize(lambda: sum(v[...].sum() for v in [*kernels(model), *biases(model)]))

    step(model, opt, X)
    for variables, rate in ((kernels, 0.5), (biases, 1.0)):
        for variable, was in zip(variables(model), variables(before), strict=True):
            np.testing.assert_allclose(variable[...], np.asarray(was[...]) - rate, rtol=1e-6)
    assert opt.get_slot("dense/kernel", "momentum").shape == (3, 4)
    assert opt.get_slot("dense/bias", "momentum") is None


def test_several_modules_have_their_place_before_their_names():
    first, second = (nnx.Linear(3, 1, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    opt = CrossShardOptimizer(optax.adam(0.1))

    @crossshard.shard(num_shards=8)
    def step(x: Any) -> None:
        opt.minimize(lambda: ((first(x) + second(x)) ** 2).mean())

    step(X)
    names = {"0/kernel", "1/kernel", "0/bias", "1/bias"}
    assert opt.state.inner_state[0].mu.keys() == names
    assert opt.get_slot("0/kernel", "m") is opt.get_slot(first.kernel, "m")


# The state, by names.


def restored_elsewhere(steps: Callable[[Any, Any], None], build: Callable[[Any], Any]) -> None:
    """Adam goes on in a fresh optimizer as in the one whose state it was given."""
    model, opt = Net(), CrossShardOptimizer(optax.adam(0.1))
    steps(model, opt)
    other, fresh = nnx.clone(model), CrossShardOptimizer(optax.adam(0.1))
    fresh.build(build(other))
    fresh.state = opt.state
    steps(model, opt)
    steps(other, fresh)
    for a, b in zip(*map(jax.tree.leaves, map(nnx.state, (model, other))), strict=True):
        np.testing.assert_array_equal(a, b)


def slope(model: Net, x: Any) -> Any:
    """Of another size for every variable, so that Adam's moments differ."""
    variables = [*kernels(model), *biases(model)]
    return sum((i + 1) * (v[...] ** 2).sum() for i, v in enumerate(variables)) + 0 * x.sum()


@crossshard.shard(num_shards=8)
def step_of_a_list(model: Any, opt: Any, x: Any) -> None:
    variables = [*kernels(model), *biases(model)]
    opt.minimize(lambda: slope(model, x), var_list=variables)


@crossshard.shard(num_shards=8)
def step_of_the_same_list_in_another_order(model: Any, opt: Any, x: Any) -> None:
    variables = [*biases(model), *kernels(model)]
    opt.minimize(lambda: slope(model, x), var_list=variables)


@pytest.mark.parametrize("step", [step_of_a_list, step_of_the_same_list_in_another_order])
def test_a_state_goes_by_names_and_not_by_places(step: Any):
    restored_elsewhere(lambda model, opt: step(model, opt, X), lambda model: model)


def test_a_state_without_names_does_not_go_into_one_with_names():
    model, opt = Net(), CrossShardOptimizer(optax.adam(0.1))
    step_of_a_list(model, opt, X)
    fresh = CrossShardOptimizer(optax.adam(0.1))
    fresh.build(kernels(model) + biases(model))
    with pytest.raises(crossshard.ArgumentError, match="structure"):
        fresh.state = opt.state


def test_variables_of_one_shape_without_names_are_not_told_apart():
    def made() -> Any:
        return [nnx.Param(jnp.ones(3)), nnx.Param(jnp.ones(3))]

    (a, b), opt = made(), CrossShardOptimizer(optax.adam(0.1))

    @crossshard.shard(num_shards=8)
    def step(x: Any) -> None:
        opt.minimize(lambda: (a[...] + 2 * b[...]).sum(), var_list=[b, a])

    step(X)
    fresh = CrossShardOptimizer(optax.adam(0.1))
    fresh.build(made())
    with pytest.raises(crossshard.VariableError, match=r"no names.*name='kernel'"):
        fresh.state = opt.state


def test_slots_by_the_name_of_their_variable():
    model, opt = Net(), CrossShardOptimizer(optax.adam(0.1))
    step_of_a_list(model, opt, X)
    assert opt.get_slot("dense/kernel", "m") is opt.get_slot(model.dense.kernel, "mu") is not None
    assert opt.get_slot("dense/nothing", "m") is None


def test_an_optimizer_whose_state_is_a_dict_has_slots():
    def init(params: Any) -> Any:
        return {"m": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), int)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], updates)
        return jax.tree.map(lambda m: -0.1 * m, m), {"m": m, "count": state["count"] + 1}

    model, opt = Net(), CrossShardOptimizer(optax.GradientTransformation(init, update))
    step_of_a_list(model, opt, X)
    assert opt.get_slot_names() == ["m"]
    slot = opt.get_slot("dense/bias", "m")
    np.testing.assert_allclose(slot[...], np.full(4, 6.0), rtol=1e-6)
    assert int(opt.state.inner_state["count"]) == 1


def test_flax_serialization():
    model, opt = Net(), CrossShardOptimizer(optax.inject_hyperparams(optax.adam)(0.1))
    step_of_a_list(model, opt, X)
    saved = flax.serialization.to_bytes(opt.state)
    fresh = CrossShardOptimizer(optax.inject_hyperparams(optax.adam)(0.5))
    fresh.build(nnx.clone(model))
    fresh.state = flax.serialization.from_bytes(fresh.state, saved)
    # Their variables are not in the same order.
    states = map(flax.serialization.to_state_dict, (opt.state, fresh.state))
    jax.tree.map(np.testing.assert_array_equal, *states)
    other = CrossShardOptimizer(optax.inject_hyperparams(optax.adam)(0.5))
    other.build(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(crossshard.ArgumentError, match=r"has .*dense/kernel"):
        flax.serialization.from_bytes(other.state, saved)


def test_a_state_with_dicts_is_assigned_as_it_was_read():
    model, opt = Net(), CrossShardOptimizer(optax.inject_hyperparams(optax.adam)(0.1))
    step_of_a_list(model, opt, X)
    before = jax.tree.map(np.asarray, opt.state)
    read = opt.state
    read.inner_state.hyperparams["learning_rate"] = 0.25
    opt.state = read
    assert float(opt.state.inner_state.hyperparams["learning_rate"]) == 0.25
    opt.state = before
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, opt.state), before)


# What is written to the state.


def hyperparameters(kind: Any = optax.sgd) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.inject_hyperparams(kind)(0.1))


@pytest.mark.parametrize(
    "write",
    [
        lambda h, x: h.__setitem__("learning_rate", x),
        lambda h, x: h.update(learning_rate=x),
        lambda h, x: h.__ior__({"learning_rate": x}),
    ],
)
@pytest.mark.parametrize("kind", [optax.sgd, optax.adam])
def test_what_is_written_to_hyperparameters_takes_effect(write: Any, kind: Any):
    model, opt = Net(), hyperparameters(kind)
    step_of_a_list(model, opt, X)
    before = np.asarray(model.dense.kernel[...])
    write(opt.state.inner_state.hyperparams, 0.0)
    assert float(opt.state.inner_state.hyperparams["learning_rate"]) == 0
    step_of_a_list(model, opt, X)
    np.testing.assert_array_equal(model.dense.kernel[...], before)
    write(opt.state.inner_state.hyperparams, 0.1)
    step_of_a_list(model, opt, X)
    assert np.abs(model.dense.kernel[...] - before).max() > 1e-3


def test_what_is_written_to_hyperparameters_inside_a_step_takes_effect():
    model, opt = Net(), hyperparameters()
    opt.build(model)

    @crossshard.shard(num_shards=8, input_shard_axes=[0, 0, None])
    def step(model: Any, opt: Any, rate: Any) -> None:
        opt.state.inner_state.hyperparams["learning_rate"] = rate
        opt.minimize(lambda: model.dense.bias[...].sum(), var_list=model)

    for rate in (0.5, 0.25):
        step(model, opt, np.float32(rate))
    np.testing.assert_allclose(model.dense.bias[...], np.full(4, 0.25), rtol=1e-6)


def test_what_cannot_be_written_to_a_state():
    opt = hyperparameters()
    opt.build(Net())
    for write in (
        lambda h: h.__setitem__("learning_rat", 0.1),
        lambda h: h.pop("learning_rate"),
        lambda h: h.clear(),
        lambda h: h.__delitem__("learning_rate"),
    ):
        with pytest.raises(crossshard.ArgumentError, match="entries here are learning_rate"):
            write(opt.state.inner_state.hyperparams)
    with pytest.raises(crossshard.ArgumentError, match=r"learning_rate.*shape \(\).*\(2, 2\)"):
        opt.state.inner_state.hyperparams["learning_rate"] = jnp.ones((2, 2))
    assert float(opt.state.inner_state.hyperparams["learning_rate"]) == np.float32(0.1)


def test_a_state_is_a_tree_as_optax_reads_it():
    model, opt = Net(), hyperparameters()
    step_of_a_list(model, opt, X)
    assert float(optax.tree.get(opt.state, "learning_rate")) == np.float32(0.1)
    opt.state = optax.tree.set(opt.state, learning_rate=jnp.float32(0.0))
    before = np.asarray(model.dense.kernel[...])
    step_of_a_list(model, opt, X)
    np.testing.assert_array_equal(model.dense.kernel[...], before)
    opt.state = jax.tree.map(np.asarray, opt.state)
    assert type(jax.tree.map(np.asarray, opt.state).inner_state.hyperparams) is dict


def test_jax_may_compare_the_keys_of_two_trees():
    # Adam calls a jitted function, whose cache compares trees with and without names.
    for key in (None, "kernel", None, "kernel"):
        variable = nnx.Param(jnp.ones(2), **({"name": key} if key else {}))
        opt = CrossShardOptimizer(optax.adam(0.1))
        with crossshard.shard_context(1):
            opt.minimize(lambda v=variable: (v[...] ** 2).sum(), var_list=[variable])
        assert int(opt.state.inner_state[0].count) == 1
