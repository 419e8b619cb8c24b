"""Keywords of apply_gradients: what nothing takes is refused, what the optimizer takes arrives."""

from collections.abc import Callable
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

# Around an optimizer of all parameters.
AROUND: dict[str, Callable[[Any], Any]] = {
    "alone": lambda inner: inner,
    "a chain": lambda inner: optax.chain(optax.clip(1e9), inner),
    "a chain of chains": lambda inner: optax.chain(optax.chain(optax.identity(), inner)),
    "masked": lambda inner: optax.masked(inner, lambda p: jax.tree.map(lambda _: True, p)),
    "partition": lambda inner: optax.partition(
        {"all": inner}, lambda p: jax.tree.map(lambda _: "all", p)
    ),
}
OPTAX = {name: around(optax.adam(0.1)) for name, around in AROUND.items()} | {
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.1),
    "schedule_free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
}


def apply(inner: Any, preprocess: Any = None, **keywords: Any) -> Any:
    w, opt = nnx.Param(jnp.zeros(2), name="w"), CrossShardOptimizer(inner, preprocess=preprocess)
    with crossshard.shard_context(1):
        pairs = opt.compute_gradients(lambda: w[...].sum(), [w])
        opt.apply_gradients(pairs, **keywords)
    return np.asarray(w[...])


@pytest.mark.parametrize("name", OPTAX)
def test_what_nothing_takes_is_refused_and_the_loss_may_go_to_any(name: str):
    for keyword in ("golbal_step", "incomming", "learning_rate", "momentum"):
        with pytest.raises(ArgumentTypeError, match=f"given '{keyword}'"):
            apply(OPTAX[name], **{keyword: 9.0})
    apply(OPTAX[name], value=jnp.float32(1))


def scaling(factor_of: str) -> optax.GradientTransformationExtraArgs:
    def named(updates: Any, state: Any, params: Any = None, *, factor: Any = 1.0, **_: Any) -> Any:
        return jax.tree.map(lambda g: -factor * g, updates), state

    def entry(updates: Any, state: Any, params: Any = None, **entries: Any) -> Any:
        return named(updates, state, params, factor=entries["factor"])

    update = {"named": named, "entry": entry}[factor_of]
    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("factor_of", ["named", "entry"])
@pytest.mark.parametrize("around", ["alone", "a chain", "a chain of chains", "masked"])
def test_what_the_optimizer_takes_arrives(factor_of: str, around: str):
    inner = AROUND[around](scaling(factor_of))
    np.testing.assert_array_equal(apply(inner, factor=0.5), [-0.5, -0.5])


def test_what_preprocess_takes_arrives():
    given = optax.sgd(1.0), scaling("named")
    np.testing.assert_array_equal(apply(*given, factor=0.5), [0.5, 0.5])
    with pytest.raises(ArgumentTypeError, match="given 'factr'"):
        apply(*given, factr=0.5)


def test_a_loss_that_the_optimizer_does_not_read_is_looked_at_for_a_nan():
    w, opt = nnx.Param(jnp.zeros(2)), CrossShardOptimizer(optax.sgd(1.0), nonfinite="skip")
    with crossshard.shard_context(1):
        for loss, expected in ((np.nan, [0, 0]), (1.0, [-1, -1])):
            pairs = opt.compute_gradients(lambda: w[...].sum(), [w])
            opt.apply_gradients(pairs, value=jnp.float32(loss))
            np.testing.assert_array_equal(w[...], expected)
