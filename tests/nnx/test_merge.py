"""An optimizer whose state differs between shards, on another number of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard.errors import VariableError
from crossshard.pipeline import Aggregator, Peers
from tests.stateful import sgd, training

X = np.random.default_rng(0).normal(size=(3, 16, 32)).astype(np.float32)


def linear(width: int = 64) -> Any:
    return nnx.Linear(32, width, use_bias=False, rngs=nnx.Rngs(0))


def mean_square(model: Any, x: Any) -> Any:
    return ((model(x) - 1) ** 2).mean()


def gradient(kernel: Any, x: Any) -> Any:
    return jax.grad(lambda kernel: ((x @ kernel - 1) ** 2).mean())(kernel)


def held(opt: Any) -> Any:
    value = opt.state.aggregate.residual["kernel"][...]
    return np.asarray(value).astype(np.float64)


@pytest.mark.parametrize(("others", "by"), [(2, "merged"), (8, "restored"), (2, "itself")])
def test_what_few_bits_hold_back_stays(others: int, by: str):
    model, opt, rate = linear(), sgd(0.5, reduce_dtype="int4"), 0.5
    kernel = np.asarray(model.kernel[...])
    wanted = np.zeros(kernel.shape)
    for x, number in zip(X, (4, others), strict=False):
        wanted += gradient(np.asarray(model.kernel[...]), x)
        training(mean_square, number)(model, opt, x)
        # Applied, or held back: nothing is lost, and nothing is there twice.
        applied = (kernel - np.asarray(model.kernel[...], np.float64)) / rate
        assert held(opt).shape == (number, 32, 64)
        assert np.abs(applied - wanted).max() > 1e-4
        np.testing.assert_allclose(applied + held(opt).sum(0), wanted, atol=1e-6)
        before, opt = opt, opt if by == "itself" else crossshard.merge_shards(opt)
        np.testing.assert_allclose(held(opt).sum(0), wanted - applied, atol=1e-6)
        assert held(before).shape == (number, 32, 64)
        if by == "restored":
            saved, opt = jax.tree.map(np.asarray, nnx.state(opt)), sgd(rate, reduce_dtype="int4")
            opt.build(model)
            nnx.update(opt, saved)


def test_what_is_held_back_counts_once_where_nothing_is_sent_in_few_bits():
    model, opt, rate = linear(24), sgd(0.5, reduce_dtype="int4"), 0.5  # 192 and 96 numbers a shard
    kernel = np.asarray(model.kernel[...])
    wanted = np.zeros(kernel.shape)
    for x, number in zip(X, (4, 8, 8), strict=True):
        wanted += gradient(np.asarray(model.kernel[...]), x)
        opt = crossshard.merge_shards(opt) if number == 8 else opt
        training(mean_square, number)(model, opt, x)
        applied = (kernel - np.asarray(model.kernel[...], np.float64)) / rate
        assert (np.abs(applied - wanted).max() > 1e-4) == (number == 4)
    np.testing.assert_allclose(applied, wanted, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Scaled(Aggregator):
    """Has a state that is no part of a sum, and is 1 at first."""

    def init(self, params: Any) -> Any:
        return jax.tree.map(jnp.ones_like, params)

    def sum(self, values: Any, state: Any, peers: Peers) -> tuple[Any, Any]:
        own = jax.tree.map(lambda s: s + 0 * peers.index(), state)
        return jax.tree.map(lambda v, s: peers.sum(v * s), values, own), own


@pytest.mark.parametrize("is_built", [False, True])
def test_what_an_aggregator_has_at_first_each_shard_has(is_built: bool):
    model, opt = linear(), sgd(0.5, aggregator=Scaled())
    if is_built:
        opt.build(model)
    before = np.asarray(model.kernel[...])
    training(mean_square, 4)(model, opt, X[0])
    expected = before - 0.5 * gradient(before, X[0])
    np.testing.assert_allclose(model.kernel[...], expected, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Smoothed(Aggregator):
    """Has a state that is the same on all shards, beside one of each shard."""

    def init(self, params: Any) -> Any:
        return (jax.tree.map(jnp.zeros_like, params),) * 2

    def sum(self, values: Any, state: Any, peers: Peers) -> tuple[Any, Any]:
        after = jax.tree.map(lambda v, s: 0.5 * s + 0.5 * peers.sum(v), values, state[0])
        return after, (after, values)


def test_what_all_shards_have_in_common_is_not_shared_out():
    model, opt = linear(), sgd(0.5, aggregator=Smoothed())
    kernel, smoothed = np.asarray(model.kernel[...]), np.zeros((32, 64))
    for x, number in zip(X, (4, 4, 2), strict=True):
        smoothed = 0.5 * smoothed + 0.5 * gradient(kernel, x)
        kernel = kernel - 0.5 * smoothed
        training(mean_square, number)(model, opt, x)
        np.testing.assert_allclose(model.kernel[...], kernel, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"accumulate_steps": 2}, {"preprocess": optax.trace(0.5)}],
    ids=["accumulation", "preprocess"],
)
def test_the_error_names_what_to_merge(options: Any):
    model, opt = linear(), sgd(0.5, **options)
    training(mean_square, 4)(model, opt, X[0])
    step = training(mean_square, 2)
    with pytest.raises(VariableError, match=r"the optimizer's state.*4 sh.* 2\. .*\(\(model, opt"):
        step(model, opt, X[1])
    step(*crossshard.merge_shards((model, opt)), X[1])
