"""evaluate and predict: metrics and values of a whole data set, as numpy takes them."""

import functools
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError
from tests.step import common
from tests.step.common import sgd_step

RNG = np.random.default_rng(0)
X = RNG.normal(size=(45, 4)).astype(np.float32)
# The first row counts: what is padded has copies of it.
MASK = np.arange(45) % 3 != 1
W = np.arange(4, dtype=np.float32)


def cut(arrays: Any, *sizes: int) -> list[Any]:
    """Batches of these many rows."""
    ends = np.cumsum(sizes)[:-1]
    leaves, tree = jax.tree.flatten(arrays)
    parts = zip(*(np.split(leaf[: sum(sizes)], ends) for leaf in leaves), strict=True)
    return [tree.unflatten(part) for part in parts]


def loss_fn(w: Any, batch: Any) -> jax.Array:
    rows = (batch["x"] @ w) ** 2
    return (rows * batch["mask"]).sum() / batch["mask"].sum()


def metrics_of(w: Any, batch: Any) -> dict[str, jax.Array]:
    out = batch["x"] @ w
    return {"square": out**2, "positive": out > 0, "features": batch["x"]}


DATA = {"x": X, "mask": MASK}
EXPECTED = {"square": (X @ W) ** 2, "positive": X @ W > 0, "features": X}


def step_of(loss: Any = loss_fn, shards: int = 8, **kwargs: Any) -> Any:
    return make_train_step(loss, optax.sgd(0.1), num_shards=shards, **kwargs)


assert_close = functools.partial(common.assert_close, atol=1e-6, rtol=1e-5)


def test_the_mean_is_that_of_all_examples():
    step = step_of()
    state = step.init(W)
    for sizes in ((16, 16, 13), (3, 20, 22), (45,)):
        found = step.evaluate(state, iter(cut(DATA, *sizes)), metrics_of)
        assert_close(found, jax.tree.map(lambda x: x.mean(0), EXPECTED))


@pytest.mark.parametrize(
    "weight", ["mask", lambda batch: batch["mask"].sum(), lambda batch: batch["mask"].mean()]
)
def test_examples_count_by_their_weight(weight: Any):
    step = step_of(weight=weight)
    # Nothing may come from rows that do not count.
    data = {"x": np.where(MASK[:, None], X, np.nan), "mask": MASK}
    found = step.evaluate(step.init(W), cut(data, 16, 16, 13), metrics_of)
    assert_close(found, jax.tree.map(lambda x: x[MASK].mean(0), EXPECTED))


def test_a_weight_that_is_no_sum_of_its_rows_is_refused():
    # A row that counts nothing would count 1.
    step = step_of(weight=lambda batch: jnp.maximum(batch["mask"].sum(), 1))
    with pytest.raises(ArgumentError, match="Pass the name of the entry, such as weight='mask'"):
        step.evaluate(step.init(W), cut(DATA, 16, 16, 13), metrics_of)


def test_sums_of_many_batches_do_not_round():
    step = step_of()
    batches = [np.full(8, 2.0**24, np.float32), *[np.ones(8, np.float32)] * 15]
    found = step.evaluate(step.init(W), batches, lambda w, x: x)
    # In 32 bits the next number after 2**24 is 2**24 + 2.
    assert found == (2**24 + 15) / 16


def test_a_loader_may_fill_its_arrays_again():
    # At the beginning of a page, as in shared memory, where JAX takes the memory as it is.
    buffer = np.frombuffer(mmap.mmap(-1, 4 * 64), np.float32)
    batches = np.float32(RNG.normal(size=(4, 64)))

    def loader() -> Any:
        for rows in batches:
            buffer[:] = rows
            yield buffer

    def late(w: Any, x: jax.Array) -> jax.Array:
        """Read the rows when they are long overwritten."""
        turns = jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), jnp.full((64, 64), w[1]))
        return x + 0 * turns[0, 0]

    step = step_of(shards=1)
    state = step.init(W)
    np.testing.assert_array_equal(step.predict(state, loader(), late), batches.ravel())
    assert_close(step.evaluate(state, loader(), late), batches.mean())


def test_one_program_for_batches_of_one_length_and_a_shorter_end():
    traced = []

    def metric(w: Any, batch: Any) -> jax.Array:
        traced.append(batch["x"].shape)
        return batch["x"] @ w

    step = step_of()
    state = step.init(W)
    for _ in range(2):
        np.testing.assert_allclose(
            step.evaluate(state, cut(DATA, 16, 16, 5), metric), (X[:37] @ W).mean(), rtol=1e-5
        )
    assert traced == [(2, 4)]


# Models.


def test_statistics_of_a_module_are_merged_and_the_average_is_taken():
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    loss = lambda model, batch: (model(batch["x"]) ** 2).mean()
    step = step_of(loss, ema=0.25, loss_over="shard")
    state, _ = step(step.init(model), {"x": X[:40]})

    def metric(model: Any, batch: Any) -> jax.Array:
        model.eval()
        return model(batch["x"]) ** 2

    for of in ({"shard": 3}, {"ema": True}):
        trained = step.model(state, **of)
        trained.eval()
        found = step.evaluate(state, cut({"x": X}, 20, 25), metric, **of)
        assert_close(found, (trained(X) ** 2).mean(0))


@pytest.mark.parametrize("options", [{}, {"sync_every": 2}], ids=["groups", "workers"])
def test_there_is_no_such_shard(options: dict[str, Any]):
    # JAX would take the last one, and of True an array of another rank.
    opt = CrossShardOptimizer(optax.sgd(0.01), group_assignment=[[0, 1], [2, 3]])
    loss = lambda w, batch: ((batch["x"] @ w) ** 2).mean()
    step = make_train_step(loss, opt, num_shards=4, **options)
    state = step.init(W)
    calls = (
        lambda shard: step.model(state, shard),
        lambda shard: step.evaluate(state, [DATA], metrics_of, shard),
        lambda shard: step.predict(state, [DATA], metrics_of, shard),
    )
    said = r"shard must be (one of the 4 shards, 0 to 3|an int); got"
    for shard in (4, -1, 10**30, np.int64(4), True, 1.0, "0", [0]):
        is_number = isinstance(shard, int | np.int64) and shard is not True
        for call in calls:
            with pytest.raises(ArgumentError if is_number else ArgumentTypeError, match=said):
                call(shard)
    assert step.model(state, np.int64(3)).shape == W.shape


@pytest.mark.parametrize(
    ("batches", "metric", "error", "said"),
    [
        (DATA, metrics_of, ArgumentTypeError, r"got dict. Write \[batch\]"),
        ([], metrics_of, ArgumentError, "no batch"),
        ([DATA], loss_fn, ArgumentError, r"value has shape \(\).*Leave out the mean"),
        ([{**DATA, "mask": 0 * MASK}], metrics_of, ArgumentError, "No example counts"),
        ([{"x": X, "mask": MASK[:3]}], metrics_of, ArgumentError, r"as many rows.*got \[3, 45\]"),
        ([DATA], "accuracy", ArgumentTypeError, "metric_fn must be a function"),
    ],
)
def test_what_cannot_be_evaluated(batches: Any, metric: Any, error: type, said: str):
    step = step_of(weight="mask")
    with pytest.raises(error, match=said):
        step.evaluate(step.init(W), batches, metric)


# predict: the values of all rows in their order.

PIECES = [X[:16], X[16:19], X[19:45]]


def scaled_loss(w: Any, batch: Any) -> jax.Array:
    return ((batch["x"] @ w) ** 2).mean() * batch["scale"]


def outputs_of(w: Any, batch: Any) -> dict[str, jax.Array]:
    out = batch["scale"] * batch["x"] @ w
    return {"out": out, "half": out.astype(jnp.bfloat16), "right": out > 0, "x": batch["x"]}


def test_the_rows_of_all_batches_in_their_order():
    step = sgd_step(scaled_loss, 0.1, 8, replicated_entries=["scale"])
    state = step.init(W)
    batches = [{"x": piece, "scale": 2.0} for piece in PIECES]
    with jax.transfer_guard("disallow"):
        found = step.predict(state, iter(batches), outputs_of)
    out = 2 * X @ W
    np.testing.assert_allclose(found["out"], out, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["x"], X)
    np.testing.assert_array_equal(found["right"], out > 0)
    assert {name: (type(x), x.dtype) for name, x in found.items()} == {
        "out": (np.ndarray, np.float32),
        "half": (np.ndarray, jnp.bfloat16),
        "right": (np.ndarray, bool),
        "x": (np.ndarray, np.float32),
    }


def test_on_a_second_axis_and_rows_that_lie_on_the_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    by = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    loss = lambda w, x: ((x @ w) ** 2).mean()
    step = make_train_step(loss, optax.sgd(0.1), mesh=mesh, axis_name="data")
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    state = step.init(jax.device_put(w, by(None, "model")))
    placed = jax.device_put(X[:16], by(("data",)))
    found = step.predict(state, [placed, X[16:]], lambda w, x: x @ w)
    np.testing.assert_allclose(found, X @ w, rtol=1e-5, atol=1e-5)
