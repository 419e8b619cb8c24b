"""One optimizer of the stateful idiom that updates one set of variables, and then another."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentError, VariableError
from tests.stateful import sgd

X = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)


class Two(nnx.Module):
    def __init__(self, of_b: int = 3):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(3, of_b, use_bias=False, rngs=rngs)
        self.unused = nnx.Param(jnp.ones(2))


def loss_of(model: Any, x: Any) -> Any:
    return ((model.b(jnp.tanh(model.a(x))) - 1) ** 2).mean()


def step_of(name: str, whole: bool = False) -> Any:
    """A step that updates one of the two; ``whole`` is by gradients of the other that are None."""

    def half(model: Any, x: Any) -> Any:
        return ((getattr(model, name)(x) - 1) ** 2).mean()

    @crossshard.shard(num_shards=2)
    def step(model: Any, opt: Any, x: Any) -> Any:
        if whole:
            return opt.minimize(lambda: half(model, x), var_list=model)
        return opt.minimize(lambda: loss_of(model, x), var_list=getattr(model, name))

    return step


def listed() -> optax.GradientTransformation:
    """SGD with a momentum that is a list of leaves, as ports of optimizers have it."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        del params
        leaves, tree = jax.tree.flatten(grads)
        new = [0.9 * m + g for m, g in zip(state, leaves, strict=True)]
        return tree.unflatten([-0.1 * m for m in new]), new

    init = lambda params: [jnp.zeros_like(x) for x in jax.tree.leaves(params)]
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_slots_of_two_sets_are_those_of_two_optimizers(momentum: float | None):
    model, opt = Two(), sgd(0.1, momentum)
    values = {name: getattr(model, name).kernel[...] for name in "ab"}
    plain = optax.sgd(0.1, momentum)
    states = {name: plain.init(value) for name, value in values.items()}

    def loss(values: Any, x: Any) -> Any:
        return ((jnp.tanh(x @ values["a"]) @ values["b"] - 1) ** 2).mean()

    steps = {name: step_of(name) for name in "ab"}
    for x, name in zip(X, "abab", strict=True):
        steps[name](model, opt, x)
        gradient = jax.grad(loss)(values, x)[name]
        updates, states[name] = plain.update(gradient, states[name])
        values[name] += updates
    for name, value in values.items():
        np.testing.assert_allclose(getattr(model, name).kernel[...], value, atol=1e-6)


@pytest.mark.parametrize("of_b", [3, 4])
@pytest.mark.parametrize(
    ("make", "leaf"),
    [(lambda: optax.flatten(optax.sgd(0.1, 0.9)), "trace"), (listed, "inner_state[1]")],
)
def test_a_momentum_of_one_set_is_not_that_of_another(make: Any, leaf: str, of_b: int):
    model, opt = Two(of_b), CrossShardOptimizer(make())
    step_of("a")(model, opt, X[0])
    step_of("a")(model, opt, X[1])
    with pytest.raises(ArgumentError, match="one optimizer for each set") as caught:
        step_of("b")(model, opt, X[2])
    assert leaf in str(caught.value)


@pytest.mark.parametrize("make", [lambda: optax.flatten(optax.sgd(0.1, 0.9)), listed])
def test_a_momentum_of_all_is_not_that_of_some(make: Any):
    model, opt = Two(), CrossShardOptimizer(make())
    opt.build(model)
    with pytest.raises(ArgumentError, match="one optimizer for each set"):
        step_of("a", whole=True)(model, opt, X[0])


def test_a_random_key_is_shared_by_two_sets():
    model = Two()
    opt = CrossShardOptimizer(optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1, 0.9)))
    for name in "ab":
        step_of(name)(model, opt, X[0])
    assert set(opt.state.inner_state[1][0].trace) == {"kernel", "kernel#1"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: sgd(0.1, accumulate_steps=2),
        lambda: CrossShardOptimizer(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
        lambda: CrossShardOptimizer(optax.chain(optax.apply_every(2), optax.sgd(0.1))),
        lambda: CrossShardOptimizer(
            optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
        ),
        lambda: CrossShardOptimizer(optax.contrib.galore(0.1, rank=1, update_proj_gap=2)),
        # A curvature that is the gradient needs no function of the loss.
        lambda: CrossShardOptimizer(
            optax.contrib.sophia(0.1, hessian_diagonal_fn=optax.identity(), update_interval=2)
        ),
    ],
    ids=["accumulate_steps", "MultiSteps", "apply_every", "sam", "galore", "sophia"],
)
@pytest.mark.parametrize("whole", [False, True])
def test_calls_that_are_counted_are_of_the_same_variables(make: Any, whole: bool):
    model, opt = Two(), make()
    step = step_of("a", whole)
    start = np.asarray(model.a.kernel[...])
    step(model, opt, X[0])
    step(model, opt, X[1])
    assert np.abs(model.a.kernel[...] - start).max() > 1e-3
    with pytest.raises(ArgumentError, match="one optimizer for each set"):
        step_of("b", whole)(model, opt, X[2])


@pytest.mark.parametrize(
    "copy",
    [nnx.clone, lambda nodes: nnx.merge(*nnx.split(nodes)), crossshard.merge_shards],
    ids=["clone", "merge", "merge_shards"],
)
def test_a_set_that_comes_first_in_a_copy_has_no_slots_of_another(copy: Any):
    found = {}
    for name, copied in (("alike", lambda nodes: nodes), ("copy", copy)):
        model, opt = Two(), sgd(0.1, 0.9)
        for x in X[:2]:
            step_of("a")(model, opt, x)
        model, opt = copied([model, opt])
        for x, part in zip(X, "bbab", strict=True):
            step_of(part)(model, opt, x)
        assert list(opt.slots.variables) == ["kernel", "kernel#1"]
        # In a copy of both sets they are told apart, too.
        model, opt = copied([model, opt])
        step_of("b")(model, opt, X[0])
        found[name] = [model.a.kernel[...], model.b.kernel[...]]
    np.testing.assert_allclose(found["copy"], found["alike"], atol=1e-6)


# Twins: two sets of the same names.


class Twin(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(3))


def update(twin: Any, opt: Any, x: Any, scale: float) -> None:
    opt.minimize(lambda: (scale * twin.kernel[...] * x).mean(), var_list=twin)


update_a, update_b = (
    crossshard.shard(num_shards=2)(lambda twin, opt, x, s=scale: update(twin, opt, x, s))
    for scale in (1.0, -10.0)
)


@crossshard.shard(num_shards=2, input_shard_axes=[None, None, None, None, 0, None])
def update_one(a: Any, b: Any, of_a: Any, of_b: Any, x: Any, first: Any) -> None:
    """Update a or b, in a branch, which gets copies of both and of their optimizers."""
    branch_a = lambda a, b, of_a, of_b, x: update(a, of_a, x, 1.0)
    branch_b = lambda a, b, of_a, of_b, x: update(b, of_b, x, -10.0)
    nnx.cond(first[0], branch_a, branch_b, a, b, of_a, of_b, x)


def merged(nodes: Any) -> Any:
    return nnx.merge(*nnx.split(nodes))


def on_one(momentum: float | None) -> list[Any]:
    """The twins after a step of a and two of b on one device, by plain Optax."""
    values = []
    for scale, batches in ((1.0, X[:1]), (-10.0, X[:2])):
        value, plain = jnp.ones(3), optax.sgd(0.1, momentum)
        state = plain.init(value)
        for x in batches:
            gradient = jax.grad(lambda value, x=x, s=scale: (s * value * x).mean())(value)
            updates, state = plain.update(gradient, state)
            value += updates
        values.append(value)
    return values


@pytest.mark.parametrize("copy", [nnx.clone, merged], ids=["clone", "merge"])
def test_in_a_copy_the_slots_of_twins_are_not_swapped(copy: Any):
    a, b, opt = Twin(), Twin(), sgd(0.1, 0.9)
    update_a(a, opt, X[0])
    update_b(b, opt, X[0])
    a, b, opt = copy([a, b, opt])
    for first in (update_b, update_a):
        with pytest.raises(VariableError, match="one optimizer for each set"):
            first(b, opt, X[1])


def test_in_a_copy_slots_of_one_twin_are_not_shared_with_another():
    a, b, opt = Twin(), Twin(), sgd(0.1, 0.9)
    update_a(a, opt, X[0])
    a, b, opt = nnx.clone([a, b, opt])
    update_a(a, opt, X[1])
    with pytest.raises(VariableError, match="one optimizer for each set"):
        update_b(b, opt, X[1])


def test_a_path_is_not_that_of_one_twin():
    """A step is given one twin alone, at the path of the other."""
    a, b, opt = Twin(), Twin(), sgd(0.1, 0.9)
    opt.build(a)
    for x in X[:2]:
        update_b(b, opt, x)
    a, b, opt = nnx.clone([a, b, opt])
    for twin in (a, b):
        with pytest.raises(VariableError, match="one optimizer for each set"):
            update_a(twin, opt, X[2])


def test_a_loop_goes_on_with_the_slots_of_a_step():
    @crossshard.shard(num_shards=2)
    def once(model: Any, opt: Any, x: Any) -> None:
        opt.minimize(lambda: loss_of(model, x), var_list=model)

    @crossshard.shard(num_shards=2)
    def twice(model: Any, opt: Any, x: Any) -> None:
        def body(_: Any, both: Any) -> Any:
            model, opt = both
            opt.minimize(lambda: loss_of(model, x), var_list=model)
            return both

        nnx.fori_loop(0, 2, body, (model, opt))

    found = []
    for later in ([once, once], [twice]):
        model, opt = Two(), sgd(0.1, 0.9)
        model.unused = None
        once(model, opt, X[0])
        for step in later:
            step(model, opt, X[1])
        found.append(model.a.kernel[...])
    np.testing.assert_allclose(*found, atol=1e-6)


def test_slots_of_another_shape_are_refused_in_a_copy():
    model, opt = Two(), sgd(0.1, 0.9)
    step_of("b")(model, opt, X[0])
    model.b = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    model, opt = nnx.clone([model, opt])
    with pytest.raises(VariableError, match=r"kernel, of shape \(3, 3\), are of another.*3,1\]"):
        step_of("b")(model, opt, X[1])


def test_in_a_branch_the_slots_of_twins_are_not_swapped():
    a, b, opt = Twin(), Twin(), sgd(0.1, 0.9)
    opt.build(a)
    opt.build(b)
    with pytest.raises(VariableError, match="one optimizer for each set"):
        update_one(a, b, opt, opt, X[0], np.zeros(1))


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("copy", [nnx.clone, merged], ids=["clone", "merge"])
def test_twins_with_an_optimizer_each_go_on_in_a_copy(copy: Any, momentum: float | None):
    a, b, of_a, of_b = Twin(), Twin(), sgd(0.1, momentum), sgd(0.1, momentum)
    update_a(a, of_a, X[0])
    update_b(b, of_b, X[0])
    a, b, of_a, of_b = copy([a, b, of_a, of_b])
    update_one(a, b, of_a, of_b, X[1], np.zeros(1, bool))
    for twin, value in zip((a, b), on_one(momentum), strict=True):
        np.testing.assert_allclose(twin.kernel[...], value, atol=1e-6)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_an_optimizer_of_twins_that_is_built_anew_goes_on(momentum: float | None):
    a, b, opt = Twin(), Twin(), sgd(0.1, momentum)
    update_a(a, opt, X[0])
    update_b(b, opt, X[0])
    a, b, copied = nnx.clone([a, b, opt])
    new = sgd(0.1, momentum)
    new.build(a)
    new.build(b)
    nnx.update(new, nnx.state(copied))
    update_b(b, new, X[1])
    for twin, value in zip((a, b), on_one(momentum), strict=True):
        np.testing.assert_allclose(twin.kernel[...], value, atol=1e-6)


@pytest.mark.parametrize("copy", [nnx.clone, merged], ids=["clone", "merge"])
def test_twins_in_one_call_go_on_in_a_copy(copy: Any):
    @crossshard.shard(num_shards=2)
    def both(a: Any, b: Any, opt: Any, x: Any) -> None:
        loss = lambda: (a.kernel[...] * x).mean() - 10 * (b.kernel[...] * x).mean()
        opt.minimize(loss, var_list=[a, b])

    alike = [Twin(), Twin(), sgd(0.1, 0.9)]
    for x in X[:2]:
        both(*alike, x)
    others = [Twin(), Twin(), sgd(0.1, 0.9)]
    both(*others, X[0])
    others = copy(others)
    both(*others, X[1])
    for one, other in zip(alike[:2], others[:2], strict=True):
        np.testing.assert_array_equal(one.kernel[...], other.kernel[...])


def test_twins_without_slots_go_on_in_a_copy():
    a, b, opt = Twin(), Twin(), sgd(0.1)
    update_a(a, opt, X[0])
    update_b(b, opt, X[0])
    a, b, opt = nnx.clone([a, b, opt])
    update_b(b, opt, X[1])
    for twin, value in zip((a, b), on_one(None), strict=True):
        np.testing.assert_allclose(twin.kernel[...], value, atol=1e-6)
