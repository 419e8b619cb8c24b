"""What parameters are called where an optimizer reads their names, and in its state."""

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
from crossshard import CrossShardOptimizer
from crossshard.errors import VariableError
from tests.quick import deep_but
from tests.stateful import adam, assert_same, training

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
    "the path as a text": by_path(lambda path: "bias" not in jax.tree_util.keystr(path)),
    "a dict": by_key(lambda key: key not in ("dense/bias", "head/bias", "bias")),
    "flax": lambda params: flax.traverse_util.path_aware_map(
        lambda path, _: "bias" not in path[-1], params
    ),
}


def decaying(mask: Any) -> CrossShardOptimizer:
    """Steps towards zero by a tenth, where the mask says so."""
    return CrossShardOptimizer(optax.chain(optax.add_decayed_weights(0.1, mask), optax.sgd(1.0)))


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
        lambda case: case[0] == "a dict" or case[1] == "a list",
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


def decay(mask: Any, *variables: nnx.Param) -> None:
    training(lambda variables, x: 0 * sum(v[...].sum() for v in variables))(
        list(variables), decaying(mask), X
    )


@pytest.mark.parametrize("names", [(None, None), ("kernel", None)])
@pytest.mark.parametrize("reads", MASKS)
def test_a_mask_that_reads_names_needs_all_of_them(reads: str, names: tuple[str | None, ...]):
    variables = [nnx.Param(jnp.ones(3), **({"name": name} if name else {})) for name in names]
    opt = decaying(MASKS[reads])
    message = r"reads the names.*#1 of the list have none.*var_list=model.*name='kernel'"
    for fails in (lambda: decay(MASKS[reads], *variables), lambda: opt.build(variables)):
        with pytest.raises(VariableError, match=message):
            fails()
    assert opt.state is None


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (MASKS["a dict"], [{"name": "kernel"}, {"name": "bias"}]),
        (lambda params: jax.tree.map(lambda x: x.ndim > 1, params), [{}, {}]),
    ],
    ids=["names in the metadata", "a mask that reads shapes needs no names"],
)
def test_variables_in_a_list(mask: Any, names: Any):
    kernel, bias = nnx.Param(jnp.ones((3, 1)), **names[0]), nnx.Param(jnp.ones(2), **names[1])
    decay(mask, bias, kernel)
    np.testing.assert_allclose(kernel[...], np.full((3, 1), 0.9), rtol=1e-6)
    np.testing.assert_array_equal(bias[...], np.ones(2))


def test_labels_that_are_the_names_are_no_slots():
    """Each variable has an optimizer of its own, and some steps are of one variable alone."""
    rules = {"kernel": optax.sgd(0.1, momentum=0.9), "bias": optax.sgd(0.1, momentum=0.5)}
    opt = CrossShardOptimizer(optax.partition(rules, lambda params: {key: key for key in params}))
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0), bias_init=nnx.initializers.ones)
    want = {name: np.float64(getattr(model, name)[...]) for name in rules}
    trace = dict.fromkeys(want, 0.0)
    loss = lambda model, x: (model.kernel[...] ** 2).sum() / 2 + (model.bias[...] ** 2).sum() / 2
    run = crossshard.shard(num_shards=8)(
        lambda model, opt, chosen, x: opt.minimize(
            lambda: loss(model, x), var_list=[getattr(model, name) for name in chosen]
        )
    )
    for chosen in (("kernel", "bias"), ("bias",), ("kernel",), ("kernel", "bias")):
        run(model, opt, chosen, X)
        for name in chosen:
            trace[name] = want[name] + (0.9 if name == "kernel" else 0.5) * trace[name]
            want[name] = want[name] - 0.1 * trace[name]
    for name in rules:
        np.testing.assert_allclose(getattr(model, name)[...], want[name], rtol=1e-6)
        slot = opt.get_slot(getattr(model, name), "momentum")
        np.testing.assert_allclose(slot[...], trace[name], rtol=1e-6)
    assert type(opt.state.inner_state.inner_states) is dict


# The state, by names.


def test_several_modules_have_their_place_before_their_names():
    first, second = (nnx.Linear(3, 1, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    opt = adam()
    crossshard.shard(num_shards=8)(
        lambda first, second, opt, x: opt.minimize(lambda: ((first(x) + second(x)) ** 2).mean())
    )(first, second, opt, X)
    names = {"0/kernel", "1/kernel", "0/bias", "1/bias"}
    assert opt.state.inner_state[0].mu.keys() == names
    assert opt.state.inner_state[0].mu["0/kernel"] is opt.get_slot(first.kernel, "m")


def slope(model: Net, x: Any) -> Any:
    """Of another size for every variable, so that Adam's moments differ."""
    variables = [*kernels(model), *biases(model)]
    return sum((i + 1) * (v[...] ** 2).sum() for i, v in enumerate(variables)) + 0 * x.sum()


def of_list(*parts: Callable[[Net], list[nnx.Param]]) -> Callable[..., Any]:
    return crossshard.shard(num_shards=8)(
        lambda model, opt, x: opt.minimize(
            lambda: slope(model, x), var_list=[v for part in parts for v in part(model)]
        )
    )


step_of_a_list, in_another_order = of_list(kernels, biases), of_list(biases, kernels)


@pytest.mark.parametrize("step", [step_of_a_list, in_another_order])
def test_a_state_goes_by_names_and_not_by_places(step: Any):
    model, opt = Net(), adam()
    step(model, opt, X)
    other, fresh = nnx.clone(model), adam()
    fresh.build(other)
    nnx.update(fresh, nnx.state(opt))
    step(model, opt, X)
    step(other, fresh, X)
    assert_same(model, other)


def test_a_state_without_names_does_not_go_into_one_with_names():
    model, opt = Net(), adam()
    step_of_a_list(model, opt, X)
    fresh = adam()
    fresh.build(kernels(model) + biases(model))
    nnx.update(fresh, nnx.state(opt))
    with pytest.raises(VariableError, match=r"dense/kernel.*restored under other names"):
        in_another_order(model, fresh, X)


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
    slot = opt.get_slot(model.dense.bias, "m")
    np.testing.assert_allclose(slot[...], np.full(4, 6.0), rtol=1e-6)
    assert int(opt.state.inner_state["count"]) == 1


# What is written to the state.


def hyperparameters(kind: Any = optax.sgd, rate: float = 0.1) -> CrossShardOptimizer:
    return CrossShardOptimizer(optax.inject_hyperparams(kind)(rate))


def rate_of(opt: CrossShardOptimizer) -> Any:
    assert opt.state is not None
    return opt.state.inner_state.hyperparams["learning_rate"]


@pytest.mark.parametrize("kind", [optax.sgd, optax.adam])
def test_hyperparameters_that_are_written_take_effect(kind: Any):
    model, opt = Net(), hyperparameters(kind)
    step_of_a_list(model, opt, X)
    before = np.asarray(model.dense.kernel[...])
    for zero in (0.0, jnp.float32(0.0)):
        rate_of(opt)[...] = zero
        step_of_a_list(model, opt, X)
        np.testing.assert_array_equal(model.dense.kernel[...], before)
    rate_of(opt)[...] = 0.1
    step_of_a_list(model, opt, X)
    assert np.abs(model.dense.kernel[...] - before).max() > 1e-3

    # Also inside of a step.
    @crossshard.shard(num_shards=8, input_shard_axes=[0, 0, None])
    def step(model: Any, opt: Any, rate: Any) -> None:
        rate_of(opt)[...] = rate
        opt.minimize(lambda: model.dense.bias[...].sum(), var_list=model)

    before = np.asarray(model.dense.bias[...])
    for rate in (0.5, 0.0):
        step(model, opt, np.float32(rate))
        moved = np.asarray(model.dense.bias[...]) - before
        assert (np.abs(moved) > 0.01).all() == (rate > 0)
        before = np.asarray(model.dense.bias[...])


def test_jax_may_compare_the_keys_of_two_trees():
    # Adam calls a jitted function, whose cache compares trees with and without names.
    for key in (None, "kernel", None, "kernel"):
        variable = nnx.Param(jnp.ones(2), **({"name": key} if key else {}))
        opt = adam()
        with crossshard.shard_context(1):
            opt.minimize(lambda v=variable: (v[...] ** 2).sum(), var_list=[variable])
        assert int(opt.state.inner_state[0].count) == 1
