"""What a loss writes besides its gradients, in a step in which something is not finite."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossshard
from tests.stateful import sgd

N, ROWS = 4, 8
RNG = np.random.default_rng(0)
# The step with a NaN in the labels of shard 1, with one in the rows of shard 2, and with one in
# those of shard 3, which the loss does not count.
IN_LABELS, IN_ROWS, UNSEEN = 1, 2, 3
X = RNG.normal(size=(5, N, ROWS, 3)).astype(np.float32)
Y = RNG.normal(size=(5, N, ROWS)).astype(np.float32)
COUNTED = np.ones((N, ROWS), np.float32)
COUNTED[3, 0] = 0
X[IN_ROWS, 2, 5] = np.nan
X[UNSEEN, 3, 0] = np.nan
Y[IN_LABELS, 1, 4] = np.nan


class Watching(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.average = nnx.BatchStat(jnp.zeros(3))  # each shard its own
        self.common = nnx.BatchStat(jnp.zeros(3))  # one for all shards
        self.decayed = nnx.Variable(jnp.float32(1.0))  # of no rows
        self.last = nnx.Intermediate(jnp.zeros(0))  # of another shape after the first loss
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        mean = x.mean(0)
        self.average[...] = 0.5 * self.average[...] + 0.5 * mean
        self.common[...] += crossshard.cross_replica_sum(mean) / N
        self.decayed[...] *= 0.5
        self.last.set_value(mean)
        self.count[...] += 1
        return self.linear(x)[:, 0]


@crossshard.shard(num_shards=N)
def train(model: Any, opt: Any, x: Any, y: Any, counted: Any) -> Any:
    def loss() -> Any:
        of_rows = (model(x) - y) ** 2
        return jnp.where(counted > 0, of_rows, 0).sum() / ROWS

    # Two parts, each with a run of the model, as for two networks.
    kernel = opt.compute_gradients(loss, var_list=[model.linear.kernel])
    bias = opt.compute_gradients(loss, var_list=[model.linear.bias])
    opt.apply_gradients([*kernel, *bias])


@pytest.mark.parametrize(
    "options",
    [{"nonfinite": "quarantine"}, {"nonfinite": "skip"}, {"loss_scale": "dynamic"}, {}],
    ids=["quarantine", "skip", "loss scale", "nothing"],
)
def test_a_shard_that_is_not_finite_keeps_what_it_had(options: Any):
    model, opt = Watching(), sgd(0.1, **options)
    average, common = np.zeros((N, 3)), np.zeros(3)
    for t in range(len(X)):
        train(model, opt, X[t].reshape(-1, 3), Y[t].reshape(-1), COUNTED.reshape(-1))
        means = X[t].mean(1).astype(np.float64)
        bad = [{}, {1}, {2}, {3}, {}][t] if options else {}
        for shard in set(range(N)) - set(bad):
            average[shard] = 0.25 * average[shard] + 0.75 * means[shard]
        if np.isfinite(means).all() or not options:
            common += 2 * means.mean(0)
        np.testing.assert_allclose(model.average[...].array, average, atol=1e-6)
        np.testing.assert_allclose(model.common[...], common, atol=1e-6)
        # What no shard has of its own stays one value, and goes on.
        assert float(model.decayed[...]) == 0.25 ** (t + 1)
        assert int(model.count[...]) == 2 * (t + 1)
    assert np.isfinite(crossshard.merge_shards(model).average[...]).all() == bool(options)
    assert np.isfinite(model.linear.kernel[...]).all() == bool(options)
