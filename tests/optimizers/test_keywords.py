"""Keywords of apply_gradients: what nothing takes is refused, what the optimizer takes arrives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentTypeError

OPTAX = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda _: True, p)),
    "lamb": lambda: optax.lamb(0.1),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "masked": lambda: optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda _: True, p)),
    "partition": lambda: optax.partition(
        {"all": optax.adam(0.1)}, lambda p: jax.tree.map(lambda _: "all", p)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
}


def apply(opt: Any, **keywords: Any) -> Any:
    w = nnx.Param(jnp.zeros(2), name="w")
    with crossshard.shard_context(1):
        pairs = opt.compute_gradients(lambda: w[...].sum(), [w])
        opt.apply_gradients(pairs, **keywords)
    return np.asarray(w[...])


@pytest.mark.parametrize("name", OPTAX)
@pytest.mark.parametrize("keyword", ["golbal_step", "incomming", "learning_rate", "momentum"])
def test_what_nothing_takes_is_refused(name: str, keyword: str):
    with pytest.raises(ArgumentTypeError, match=f"given '{keyword}'"):
        apply(CrossShardOptimizer(OPTAX[name]()), **{keyword: 9.0})


@pytest.mark.parametrize("name", OPTAX)
def test_the_loss_may_go_to_any(name: str):
    apply(CrossShardOptimizer(OPTAX[name]()), value=jnp.float32(1))


def scale_by_factor() -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, *, factor: Any = 1.0, **_: Any) -> Any:
        return jax.tree.map(lambda g: -factor * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def scale_by_entry() -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, **entries: Any) -> Any:
        return jax.tree.map(lambda g: -entries["factor"] * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


AROUND = {
    "alone": lambda inner: inner,
    "a chain": lambda inner: optax.chain(optax.clip(1e9), inner),
    "a chain of chains": lambda inner: optax.chain(optax.chain(optax.identity(), inner)),
    "masked": lambda inner: optax.masked(inner, lambda p: jax.tree.map(lambda _: True, p)),
    "partition": lambda inner: optax.partition(
        {"all": inner}, lambda p: jax.tree.map(lambda _: "all", p)
    ),
    "named": lambda inner: optax.named_chain(("scale", inner)),
}


@pytest.mark.parametrize("inner", [scale_by_factor, scale_by_entry])
@pytest.mark.parametrize("around", AROUND)
def test_what_the_optimizer_takes_arrives(inner: Any, around: str):
    opt = CrossShardOptimizer(AROUND[around](inner()))
    np.testing.assert_array_equal(apply(opt, factor=0.5), [-0.5, -0.5])


def test_what_preprocess_takes_arrives():
    opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=scale_by_factor())
    np.testing.assert_array_equal(apply(opt, factor=0.5), [0.5, 0.5])
    with pytest.raises(ArgumentTypeError, match="given 'factr'"):
        apply(opt, factr=0.5)


def test_what_one_of_optax_takes_arrives():
    opt = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    )
    apply(CrossShardOptimizer(opt), value=jnp.float32(1))
    every_other = optax.transforms.conditionally_transform(
        optax.scale(-1.0), lambda step, go, **_: go, forward_extra_args=True
    )
    for go, expected in ((True, -1.0), (False, 1.0)):
        got = apply(CrossShardOptimizer(optax.chain(every_other)), go=jnp.array(go))
        np.testing.assert_array_equal(got, np.full(2, expected))
