"""Variables that differ between shards: how they are read, merged, written and stored again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossshard
from crossshard.errors import ArgumentError, VariableError
from crossshard.nnx import PerShardArray
from tests.stateful import adam, sgd

SHARDS = 8
ROWS = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
EVALUATED = np.random.default_rng(1).normal(size=(SHARDS, 4)).astype(np.float32)


class ByHand(nnx.Module):
    """A batch norm written by hand, whose statistics broadcast over a batch."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        self.average = nnx.BatchStat(jnp.zeros(4))
        self.training = True

    def __call__(self, x: Any) -> Any:
        if self.training:
            self.average[...] = 0.5 * self.average[...] + 0.5 * x.mean(0)
            return self.linear(x - x.mean(0))
        return self.linear(x - self.average[...])


class OfFlax(nnx.Module):
    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0), momentum=0.5)
        self.linear = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.linear(self.norm(x))


def mean_square(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


@crossshard.shard(num_shards=SHARDS)
def train(model: Any, opt: Any, x: Any) -> Any:
    return opt.minimize(lambda: mean_square(model, x), var_list=model)


def trained(model: Any) -> Any:
    opt = sgd(0.1)
    for _ in range(2):
        train(model, opt, ROWS)
    return model


def evaluating(model: Any) -> Any:
    if isinstance(model, ByHand):
        model.training = False
    else:
        model.eval()
    return model


@pytest.mark.parametrize("kind", [ByHand, OfFlax])
@pytest.mark.parametrize("how", [lambda f: f, nnx.jit])
def test_a_model_whose_statistics_differ_says_how_to_evaluate_it(kind: Any, how: Any):
    # With as many rows as shards, the statistics would broadcast over the batch.
    model = evaluating(trained(kind()))
    with pytest.raises(VariableError, match=r"8 shards.*merge_shards\(model\)"):
        how(lambda model, x: model(x))(model, EVALUATED)


def test_the_model_to_evaluate_has_the_mean_of_the_statistics():
    model = trained(OfFlax())
    merged = evaluating(crossshard.merge_shards(model))
    of_shards = ROWS.reshape(SHARDS, -1, 4).astype(np.float64)
    # Twice half of what it was, and half of the batch's.
    mean = 0.75 * of_shards.mean(1)
    var = 0.25 + 0.75 * of_shards.var(1)
    np.testing.assert_allclose(model.norm.mean[...], mean, atol=1e-6)
    np.testing.assert_allclose(merged.norm.mean[...], mean.mean(0), atol=1e-6)
    np.testing.assert_allclose(merged.norm.var[...], var.mean(0), atol=1e-6)
    normed = (EVALUATED - mean.mean(0)) / np.sqrt(var.mean(0) + 1e-5)
    normed = normed * np.asarray(model.norm.scale[...]) + np.asarray(model.norm.bias[...])
    expected = normed @ np.asarray(model.linear.kernel[...]) + np.asarray(model.linear.bias[...])
    np.testing.assert_allclose(merged(EVALUATED), expected, atol=1e-5)
    # The model itself trains on as it was.
    assert crossshard.nnx.is_per_shard(model.norm.mean)
    assert not crossshard.nnx.is_per_shard(model.linear.kernel)
    of_one = crossshard.merge_shards(model, shard=3)
    np.testing.assert_allclose(of_one.norm.mean[...], mean[3], atol=1e-6)
    with pytest.raises(ArgumentError, match="8 shards, 0 to 7; got 8"):
        crossshard.merge_shards(model, shard=8)


def test_a_metric_of_flax():
    metric = nnx.metrics.Average()

    @crossshard.shard(num_shards=SHARDS)
    def update(metric: Any, values: Any) -> None:
        metric.update(values=values)

    for _ in range(2):
        update(metric, ROWS[:, 0])
        update(metric, ROWS[:, 1])
        with pytest.raises(VariableError, match="merge_shards"):
            metric.compute()
        merged = crossshard.merge_shards(metric).compute()
        np.testing.assert_allclose(float("%.4f" % merged), ROWS[:, :2].mean(), atol=6e-5)  # noqa: UP031
        metric.reset()


def test_parameters_of_groups_are_merged_by_naming_a_shard():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    opt = adam(0.1, group_assignment=groups)
    train(model, opt, ROWS)
    with pytest.raises(VariableError, match=r"Param.*merge_shards\(model, shard=0\)"):
        crossshard.merge_shards(model)
    for shard in (0, 7):
        merged = crossshard.merge_shards({"model": model, "opt": opt}, shard=shard)
        np.testing.assert_array_equal(merged["model"].kernel[...], model.kernel[...].array[shard])
        assert merged["opt"].state.inner_state[0].mu["kernel"].shape == (4, 1)


@pytest.mark.parametrize("make", [sgd, adam])
def test_parameters_of_groups_are_not_trained_as_one_model(make: Any):
    model = nnx.Linear(4, 1, use_bias=False, rngs=nnx.Rngs(0))
    train(model, sgd(0.1, group_assignment=[[0, 2, 4, 6], [1, 3, 5, 7]]), ROWS)
    before = np.asarray(model.kernel[...].array)
    with pytest.raises(VariableError, match=r"reduces over all 8.*merge_shards\(model, shard=0\)"):
        train(model, make(0.1), ROWS)
    np.testing.assert_array_equal(model.kernel[...].array, before)
    assert np.ptp(before, axis=0).any()

    @crossshard.shard(num_shards=SHARDS)
    def from_the_mean(model: Any, opt: Any, x: Any) -> Any:
        # One model again: the step has written it.
        model.kernel[...] = crossshard.cross_replica_sum(model.kernel[...]) / SHARDS
        return opt.minimize(lambda: mean_square(model, x), var_list=model)

    from_the_mean(model, sgd(0.1), ROWS)
    mean = before.mean(0)
    gradient = jax.grad(lambda w: ((ROWS @ w) ** 2).mean())(mean)
    found = model.kernel[...]
    found = np.asarray(found.array if crossshard.nnx.is_per_shard(model.kernel) else found)
    np.testing.assert_allclose(found, np.broadcast_to(mean - 0.1 * gradient, found.shape), 1e-5)


# fmt: off
COMPUTED = [
    lambda v: v[...] + 1, lambda v: 1 - v[...], lambda v: v * 2, lambda v: EVALUATED - v[...],
    lambda v: jnp.asarray(EVALUATED) * v[...], lambda v: jnp.mean(v[...]),
    lambda v: EVALUATED @ v[...], lambda v: jnp.dot(EVALUATED, v[...]), lambda v: -v,
    lambda v: abs(v[...]), lambda v: v[...] > 0, lambda v: float(v[...]), lambda v: bool(v[...]),
    lambda v: "%.4f" % v[...], lambda v: f"{v[...]:.4f}",  # noqa: UP031
    lambda v: v[0], lambda v: v[...][:, 0], lambda v: list(v[...]), lambda v: len(v),
    lambda v: jax.jit(lambda x: x + 1)(v[...]),
    lambda v: jax.tree.map(jnp.square, v[...])[...] ** 2,
]
# fmt: on


@pytest.mark.parametrize("compute", COMPUTED)
def test_it_is_not_computed_with(compute: Any):
    variable = nnx.Variable(jnp.zeros(4))
    variable.set_value(PerShardArray(jnp.zeros((SHARDS, 4))))
    with pytest.raises(VariableError, match="differs between 8 shards"):
        compute(variable)


def test_how_it_is_read_and_written():
    variable = nnx.Variable(jnp.zeros(4))
    values = np.arange(32, dtype=np.float32).reshape(SHARDS, 4)
    variable.set_value(PerShardArray(jnp.asarray(values)))
    assert isinstance(variable[...], PerShardArray)
    np.testing.assert_array_equal(variable[...].array, values)
    np.testing.assert_array_equal(np.asarray(variable[...]), values)
    assert (variable[...].shape, variable[...].dtype) == ((8, 4), np.float32)
    assert "[28., 29., 30., 31.]" in repr(variable)
    variable[...] = jnp.ones(4)
    np.testing.assert_array_equal(variable[...].array, np.ones((8, 4)))
    variable[...] = values
    np.testing.assert_array_equal(variable[...].array, values)
    with pytest.raises(VariableError, match=r"\(4,\), or \(8, 4\).*got \(3,\)"):
        variable[...] = jnp.ones(3)
    with pytest.raises(VariableError, match="8 shards"):
        variable[0] = jnp.ones(4)
    # One value, written whole, is one for all.
    variable.set_value(jnp.ones(4))
    assert not crossshard.nnx.is_per_shard(variable)


def test_restored_statistics_are_not_spread_again():
    model = trained(ByHand())
    pure = nnx.to_pure_dict(nnx.state(model))
    other = ByHand()
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(other, state)
    for each in (model, other):
        train(each, sgd(0.1), ROWS)
        assert each.average[...].shape == (SHARDS, 4)
    np.testing.assert_array_equal(model.average[...], other.average[...])


def test_what_becomes_equal_again_is_stored_once_again():
    model, opt = ByHand(), sgd(0.1)
    traces: list[str] = []
    traced = 0

    @crossshard.shard(num_shards=SHARDS)
    def step(model: Any, opt: Any, x: Any) -> Any:
        traces.append("step")
        return opt.minimize(lambda: mean_square(model, x), var_list=model)

    @crossshard.shard(num_shards=SHARDS)
    def merge(model: Any) -> None:
        traces.append("merge")
        model.average[...] = crossshard.cross_replica_sum(model.average[...]) / SHARDS

    average = np.zeros((SHARDS, 4))
    of_shards = ROWS.reshape(SHARDS, -1, 4).mean(1)
    for round_ in range(4):
        step(model, opt, ROWS)
        average = 0.5 * average + 0.5 * of_shards
        np.testing.assert_allclose(model.average[...].array, average, atol=1e-6)
        merge(model)
        assert not crossshard.nnx.is_per_shard(model.average)
        average = np.broadcast_to(average.mean(0), average.shape)
        np.testing.assert_allclose(model.average[...], average[0], atol=1e-6)
        traced = len(traces) if round_ == 0 else traced
    assert len(traces) == traced
    assert evaluating(model)(EVALUATED).shape == (SHARDS, 1)


def test_other_numbers_of_shards_go_on_from_what_was_merged():
    model = trained(ByHand())
    four = crossshard.shard(num_shards=4)(lambda model, x: mean_square(model, x))
    with pytest.raises(VariableError, match=r"differs between 8.*runs on 4.*merge_sh"):
        four(model, ROWS)
    merged = crossshard.merge_shards(model)
    four(merged, ROWS)
    assert merged.average[...].shape == (4, 4)
