"""Metrics, and counters, that differ between shards: merged, they are those of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossshard
from crossshard.errors import VariableError

X = np.random.default_rng(0).normal(size=16).astype(np.float32) + np.linspace(-3, 5, 16, dtype="f")
MASK = np.array([1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0], bool)


def update(metrics: Any, x: Any, mask: Any) -> None:
    logits = jnp.stack([x, -x, 0 * x], 1)
    metrics["average"].update(values=x)
    metrics["masked"].update(values=x, mask=mask)
    metrics["welford"].update(values=x)
    labels = mask.astype(jnp.int32)
    metrics["both"].update(values=x, logits=logits, labels=labels, mask=mask)


def some_metrics() -> Any:
    average, accuracy = nnx.metrics.Average, nnx.metrics.Accuracy
    both = nnx.MultiMetric(accuracy=accuracy(), loss=average())
    return {
        "average": average(),
        "masked": average(),
        "welford": nnx.metrics.Welford(),
        "both": both,
    }


def test_metrics_of_shards_are_those_of_one_device():
    ours, plain = some_metrics(), some_metrics()
    step = crossshard.shard(num_shards=4)(update)
    for x in (X, X**2):
        step(ours, x, MASK)
        update(plain, jnp.asarray(x), jnp.asarray(MASK))
    merged = crossshard.merge_shards(ours)
    for name, metric in plain.items():
        found, wanted = (jax.tree.leaves(each.compute()) for each in (merged[name], metric))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=name)


def test_statistics_of_shards_with_other_counts_are_put_together():
    parts = [X[:5], X[5:6], X[:0], X[6:]]
    rows = [(x.size, x.mean() if x.size else 0, x.size and x.var() * x.size) for x in parts]
    metric = nnx.metrics.Welford()
    for name, values in zip(("count", "mean", "m2"), zip(*rows, strict=True), strict=True):
        variable = getattr(metric, name)
        of_shards = jnp.asarray(values, variable.get_value().dtype)
        variable.set_value(crossshard.nnx.PerShardArray(of_shards))
    found = crossshard.merge_shards(metric).compute()
    np.testing.assert_allclose(found.mean, X.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.standard_deviation, X.std(), rtol=1e-6)
    np.testing.assert_allclose(found.standard_error_of_mean, X.std() / 4, rtol=1e-6)
    assert crossshard.merge_shards(metric, shard=3).count[...] == 10


class Largest(nnx.Metric):
    """The largest value so far: neither a sum nor a mean over the shards."""

    def __init__(self):
        self.value = nnx.metrics.MetricState(jnp.float32(-jnp.inf))

    def update(self, values: Any) -> None:
        self.value.set_value(jnp.maximum(self.value.get_value(), values.max()))


def count_positive(seen: Any, x: Any) -> None:
    seen.set_value(seen.get_value() + (x > 0).sum())


@pytest.mark.parametrize(
    ("node", "update", "of_first"),
    [
        (Largest, Largest.update, X[:4].max()),
        (lambda: nnx.Variable(jnp.int32(0)), count_positive, (X[:4] > 0).sum()),
    ],
)
def test_what_no_rule_merges_is_refused_unless_a_shard_is_chosen(
    node: Any, update: Any, of_first: Any
):
    node = node()
    crossshard.shard(num_shards=4)(update)(node, X)
    with pytest.raises(VariableError, match=r"differs between 4 shards.*shard=0"):
        crossshard.merge_shards(node)
    (merged,) = jax.tree.leaves(nnx.state(crossshard.merge_shards({"it": node}, shard=0)))
    assert merged == of_first
    # What is the same on all shards is merged.
    (variable,) = (x for _, x in nnx.iter_graph({"it": node}) if isinstance(x, nnx.Variable))
    variable.set_value(crossshard.nnx.PerShardArray(jnp.full(4, 3, variable[...].dtype)))
    (merged,) = jax.tree.leaves(nnx.state(crossshard.merge_shards({"it": node})))
    assert merged == 3
