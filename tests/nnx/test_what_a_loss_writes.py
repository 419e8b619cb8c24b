"""What a loss writes besides its gradients: to what it trains, too, and where it is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.errors import VariableError
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


# What it writes to the variables that it trains.


class Clipped(nnx.Linear):
    """Bounds the norm of each column of its kernel before it is used."""

    def __call__(self, x: Any) -> Any:
        kernel = self.kernel[...]
        self.kernel[...] = kernel * jnp.minimum(1, 0.5 / jnp.linalg.norm(kernel, axis=0))
        return super().__call__(x)


class Doubling(nnx.Linear):
    """Writes what its rows decide."""

    def __call__(self, x: Any) -> Any:
        self.kernel[...] *= 1 + x.mean()
        return super().__call__(x)


def of_linear(layer: Any) -> Any:
    return lambda rngs: layer(nnx.Linear(3, 1, rngs=rngs), rngs=rngs)


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize(
    "make",
    [
        of_linear(nnx.WeightNorm),
        of_linear(nnx.SpectralNorm),
        lambda rngs: Clipped(3, 1, rngs=rngs),
    ],
    ids=["WeightNorm", "SpectralNorm", "a bound"],
)
def test_a_layer_may_write_to_its_own_kernel(make: Any, momentum: float | None):
    one, many = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    plain, opt = nnx.Optimizer(one, optax.sgd(0.1, momentum), wrt=nnx.Param), sgd(0.1, momentum)
    loss = lambda model, x, y: ((model(x)[:, 0] - y) ** 2).mean()

    @nnx.jit
    def on_one(model: Any, opt: Any, x: Any, y: Any) -> None:
        opt.update(model, nnx.grad(loss)(model, x, y))

    @crossshard.shard(num_shards=N)
    def on_many(model: Any, opt: Any, x: Any, y: Any) -> None:
        opt.minimize(lambda: loss(model, x, y), var_list=model)

    start = nnx.to_flat_state(nnx.state(nnx.clone(one), nnx.Param))
    for x, y in zip(np.nan_to_num(X[:3]), np.nan_to_num(Y[:3]), strict=True):
        on_one(one, plain, x.reshape(-1, 3), y.reshape(-1))
        on_many(many, opt, x.reshape(-1, 3), y.reshape(-1))
    ends = (nnx.to_flat_state(nnx.state(model, nnx.Param)) for model in (one, many))
    for (_, was), (path, wanted), (_, found) in zip(start, *ends, strict=True):
        assert np.abs(wanted[...] - was[...]).max() > 1e-3, path
        np.testing.assert_allclose(found[...], wanted[...], atol=1e-6, err_msg=str(path))


@pytest.mark.parametrize("remat", [False, True])
def test_value_and_grad_keeps_what_a_loss_writes(remat: bool):
    one, many = (nnx.WeightNorm(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)) for _ in "12")
    called = nnx.remat(lambda model, x: model(x)) if remat else lambda model, x: model(x)
    loss = lambda model, x: (called(model, x) ** 2).mean()
    opt = sgd(0.1)
    plain = nnx.Optimizer(one, optax.sgd(0.1), wrt=nnx.Param)
    sharded = nnx.Optimizer(many, opt, wrt=nnx.Param)

    @crossshard.shard(num_shards=N)
    def step(model: Any, state: Any, x: Any) -> None:
        _, gradients = crossshard.value_and_grad(loss, optimizer=opt)(model, x)
        state.update(model, gradients)

    for x in np.nan_to_num(X[:3]).reshape(3, -1, 3):
        plain.update(one, nnx.grad(loss)(one, x))
        step(many, sharded, x)
    wanted, found = one.layer_instance.kernel[...], many.layer_instance.kernel[...]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("remat", [False, True])
def test_with_types_what_a_loss_writes_is_each_shards_own(remat: bool):
    mesh = jax.make_mesh((N,), "shards", axis_types=(jax.sharding.AxisType.Auto,))
    model = nnx.WeightNorm(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    linear = nnx.remat(lambda model, x: model(x)) if remat else lambda model, x: model(x)
    used = model.layer_instance if remat else model
    loss = lambda model, x: (linear(model, x) ** 2).mean()

    @nnx.shard_map(mesh=mesh, in_specs=(P(), P("shards")), out_specs=P("shards"))
    def step(model: Any, x: Any) -> Any:
        return crossshard.value_and_grad(loss)(model, x)[0][None]

    x = np.nan_to_num(X[0]).reshape(-1, 3)
    if remat:  # it writes nothing
        assert step(used, x).shape == (N,)
        return
    with pytest.raises(VariableError, match="of which a shard has its own under check_vma=True"):
        step(used, x)


def test_what_differs_between_shards_is_not_written_to_one_model():
    model, opt = Doubling(3, 1, rngs=nnx.Rngs(0)), sgd(0.1)
    was = np.asarray(model.kernel[...])

    @crossshard.shard(num_shards=N)
    def step(model: Any, opt: Any, x: Any) -> None:
        opt.minimize(lambda: (model(x) ** 2).mean(), var_list=model)

    with pytest.raises(VariableError, match="one model on all 4"):
        step(model, opt, X[0].reshape(-1, 3))
    np.testing.assert_array_equal(model.kernel[...], was)
    # Nothing shows that shards of a group would write the same.
    opt = sgd(0.1, group_assignment=[[0, 1], [2, 3]])
    with pytest.raises(VariableError, match="in groups of shards"):
        step(model, opt, X[0].reshape(-1, 3))
    # A group of one shard has nobody who could write something else.
    model = Doubling(3, 1, rngs=nnx.Rngs(0))
    step(model, sgd(0.1, group_assignment=[[0], [1], [2], [3]]), X[0].reshape(-1, 3))
    assert np.ptp(model.kernel[...].array, axis=0).max() > 1e-3
    # One shard has all rows.
    model = Doubling(3, 1, rngs=nnx.Rngs(0))
    crossshard.shard(
        lambda model, opt, x: opt.minimize(lambda: (model(x) ** 2).mean(), var_list=model),
        [model, sgd(0.1), X[0].reshape(-1, 3)],
    )
    assert np.abs(crossshard.merge_shards(model).kernel[...] - was).max() > 1e-3
