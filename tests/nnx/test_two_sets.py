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
from crossshard.errors import ArgumentError
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
