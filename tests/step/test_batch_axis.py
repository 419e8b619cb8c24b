"""batch_axis: rows along another axis, or along one for each entry, step as on one device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, LossError
from tests.processes import DEVICES, PROCESSES, join, run_processes
from tests.quick import deep
from tests.step.common import assert_close, on_one_device, sgd_step, train

RNG = np.random.default_rng(0)
# As many steps of time as rows, so that no shape tells one from the other.
ROWS = TIME = 8
WIDTH, WORDS, STEPS = 4, 6, 2
PARAMS = {
    "in": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2,
    "state": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2,
    "out": RNG.normal(size=(WIDTH, WORDS)).astype(np.float32) / 2,
}
AXES = {"x": 1, "words": -1, "mask": 1, "label": 0, "image": 3, "table": None, "heat": None}
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(0.01)}


def batch_of(rows: int, heat: Any = 2.0) -> dict[str, Any]:
    return {
        "x": RNG.normal(size=(TIME, rows, WIDTH)).astype(np.float32),
        "words": RNG.integers(0, WORDS, size=(TIME, rows)),
        "mask": (RNG.uniform(size=(TIME, rows)) < 0.7).astype(np.float32),
        "label": RNG.integers(0, WORDS, size=rows),
        "image": RNG.normal(size=(3, 3, WIDTH, rows)).astype(np.float32),
        "table": np.linspace(-1, 1, WORDS * WIDTH, dtype=np.float32).reshape(WORDS, WIDTH),
        "heat": heat,
    }


BATCHES = [batch_of(ROWS, heat) for heat in (2.0, np.float32(0.5))][:STEPS]
UNEVEN = [batch_of(rows) for rows in (13, 7)]


def states_of(params: Any, xs: Any) -> jax.Array:
    """The states of a recurrent network, ``[time, rows, …]``."""

    def cell(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ params["in"] + h @ params["state"])
        return h, h

    return jax.lax.scan(cell, jnp.zeros(xs.shape[1:]), xs)[1]


def recurrent(params: Any, batch: Any) -> jax.Array:
    logits = states_of(params, batch["x"])[-1] @ params["out"] / batch["heat"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def of_tokens(params: Any, batch: Any) -> jax.Array:
    """The loss of each next word, ``[time - 1, rows]``."""
    logits = states_of(params, batch["table"][batch["words"]])[:-1] @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["words"][1:])


def language(params: Any, batch: Any) -> jax.Array:
    return of_tokens(params, batch).mean()


def masked(params: Any, batch: Any) -> jax.Array:
    counts = batch["mask"][1:]
    return (of_tokens(params, batch) * counts).sum() / counts.sum()


def last(params: Any, batch: Any) -> jax.Array:
    """Rows last, beside a label whose rows are first."""
    pixels = jnp.tanh(jnp.einsum("hwcb,cd->bhwd", batch["image"], params["in"])).mean((1, 2))
    logits = pixels @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


LOSSES: dict[str, Callable[..., Any]] = {"recurrent": recurrent, "language": language, "last": last}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"weight_update": "sharded"},
    "in parts": {"params": "sharded"},
    "microbatches": {"accumulate_steps": 2},
    "microbatches in parts": {"accumulate_steps": 2, "params": "sharded"},
    "batch": {"loss_over": "batch"},
    "batch in microbatches": {"loss_over": "batch", "accumulate_steps": 2},
    "batch in parts": {"loss_over": "batch", "params": "sharded"},
}
QUICK = {("recurrent", "plain"), ("last", "microbatches"), ("language", "batch in microbatches")}
TABLE = [
    (loss, way, rule) if (loss, way) in QUICK and rule == "sgd" else deep((loss, way, rule))
    for loss in LOSSES
    for way in WAYS
    for rule in OPTIMIZERS
]


@pytest.mark.parametrize(("loss", "way", "rule"), TABLE)
def test_rows_along_any_axis_step_as_on_one_device(loss: str, way: str, rule: str):
    step = make_train_step(
        LOSSES[loss], OPTIMIZERS[rule], num_shards=4, batch_axis=AXES, **WAYS[way]
    )
    state = train(step, step.init(PARAMS), BATCHES)
    expected, _ = on_one_device(LOSSES[loss], OPTIMIZERS[rule], PARAMS, BATCHES)
    assert_close(step.model(state), expected)


def weight_of(batch: Any) -> jax.Array:
    return batch["mask"][1:].sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_steps": 2},
        deep({"params": "sharded"}),
        deep({"accumulate_steps": 2, "weight_update": "sharded"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", ["sgd", deep("adamw")])
def test_uneven_rows_are_padded_with_weights(rule: str, options: dict[str, Any]):
    step = make_train_step(
        masked, OPTIMIZERS[rule], num_shards=4, batch_axis=AXES, weight=weight_of, **options
    )
    state = train(step, step.init(PARAMS), UNEVEN)
    expected, _ = on_one_device(masked, OPTIMIZERS[rule], PARAMS, UNEVEN)
    assert_close(step.model(state), expected)


def test_one_axis_of_all_with_names_of_what_is_whole():
    loss = lambda w, batch: jnp.tanh(batch["x"] @ w / batch["heat"]).mean()
    batches = [{"x": each["x"], "heat": each["heat"]} for each in BATCHES]
    step = sgd_step(loss, 0.1, 4, batch_axis=1, replicated_entries=("heat",))
    state = train(step, step.init(PARAMS["in"]), batches)
    expected, _ = on_one_device(loss, optax.sgd(0.1), PARAMS["in"], batches)
    assert_close(step.model(state), expected)


def test_every_shard_has_its_rows_and_whole_entries_are_everywhere():
    step = sgd_step(recurrent, 0.1, 4, batch_axis=AXES)
    abstract = step._program._place.abstract(batch_of(12))
    shapes = {name: x.sharding.shard_shape(x.shape) for name, x in abstract.items()}
    assert shapes["x"] == (TIME, 3, WIDTH)
    assert shapes["words"] == (TIME, 3)
    assert shapes["image"] == (3, 3, WIDTH, 3)
    assert (shapes["label"], shapes["table"], shapes["heat"]) == ((3,), (WORDS, WIDTH), ())
    # What lies on the mesh so is not moved.
    one, two = (step._program._place(batch) for batch in [batch_of(12)] * 2)
    again = step._program._place(one)
    assert all(again[name] is one[name] for name in one)
    assert_close(one, two)


def test_the_last_axis_is_another_one_where_an_array_has_more():
    place = sgd_step(last, 0.1, 4, batch_axis=-1)._program._place
    one = place(place(np.arange(8.0)))
    assert place(one) is one
    two = jax.device_put(np.ones((8, 8)), one.sharding)
    assert place(two).sharding.shard_shape((8, 8)) == (8, 2)


def test_what_processes_tell_each_other_of_a_batch():
    batch = {"x": np.ones((TIME, 12, WIDTH), np.float32), "y": np.ones(12), "table": np.ones(3)}
    for weight, rows in ((None, "12"), ("y", "any")):
        axes = {"x": 1, "y": 0, "table": None}
        step = sgd_step(recurrent, 0.1, 4, batch_axis=axes, weight=weight)
        told = step._program._place.rows_of(batch)
        assert told == f"float64[3],float32[8,{rows},4],float64[{rows}]"


def test_what_is_of_the_rows_alone_counts_them():
    batch = {"x": RNG.normal(size=(3, 16, WIDTH)).astype(np.float32)}
    loss = lambda w, batch: jnp.tanh(batch["x"] @ w).mean()
    w = np.ones(WIDTH, np.float32)
    step = sgd_step(loss, 0.1, 4, batch_axis=1, metrics=("noise_variance",))
    _, metrics = step(step.init(w), batch)
    of_rows = lambda rows: np.float64(jax.grad(loss)(w, {"x": batch["x"][:, rows]}))
    of_shards = np.mean([(of_rows(slice(s, s + 4)) ** 2).sum() for s in range(0, 16, 4)])
    variance = (of_shards - (of_rows(slice(None)) ** 2).sum()) / (1 / 4 - 1 / 16)
    np.testing.assert_allclose(metrics["noise_variance"], variance, rtol=1e-4)


def test_noise_of_a_row_goes_with_it():
    def noisy(w: Any, x: Any, rng: Any) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.normal(key, (TIME, WIDTH)), out_axes=1)(rng)
        return ((x + noise) @ w).mean() + (w**2).sum()

    models = []
    for number, options in ((1, {}), (4, {}), (2, {"accumulate_steps": 2})):
        step = sgd_step(noisy, 0.1, number, batch_axis=1, rng_per="row", **options)
        state, _ = step(step.init(np.ones(WIDTH, np.float32), 3), BATCHES[0]["x"])
        models.append(np.asarray(step.model(state)))
    assert_close(models[1:], [models[0]] * 2)


def test_state_that_a_loss_returns():
    def loss(w: Any, mean: Any, x: Any) -> Any:
        return (x @ w).mean(), 0.5 * (mean + x.mean())

    step = sgd_step(loss, 0.1, 4, batch_axis=1, model_state="mean")
    x = BATCHES[0]["x"]
    state, _ = step(step.init(np.ones(WIDTH, np.float32), model_state=np.float32(1)), x)
    w, mean = step.model(state)
    assert_close((w, mean), (1 - 0.1 * x.mean((0, 1)), 0.5 * (1 + x.mean())))


# What the loss is in its rows.


def test_what_compares_rows_along_their_axis_is_refused():
    over_time = lambda w, x: ((x - x.mean(0)) @ w).std(0).mean()
    over_rows = lambda w, x: ((x - x.mean(1, keepdims=True)) @ w).std(1).mean()
    w, x = np.ones(WIDTH, np.float32), BATCHES[0]["x"]
    for axis, right, wrong in ((1, over_time, over_rows), (0, over_rows, over_time)):
        step = sgd_step(right, 0.1, 4, batch_axis=axis)
        state = train(step, step.init(w), [x])
        assert_close(step.model(state), on_one_device(right, optax.sgd(0.1), w, [x])[0])
        with pytest.raises(LossError, match="compares rows"):
            train(sgd_step(wrong, 0.1, 4, batch_axis=axis), step.init(w), [x])


def test_a_loop_over_axis_0_names_the_option():
    step = sgd_step(lambda params, x: states_of(params, x)[-1].mean(), 0.1, 4)
    with pytest.raises(LossError, match=r"a row meets those before it.*write batch_axis=1"):
        step(step.init(PARAMS), BATCHES[0]["x"])


def test_a_mean_that_no_trace_shows_is_halved_along_its_axis():
    @jax.custom_jvp
    def opaque(x: Any) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: x, like, x, vmap_method="sequential")

    opaque.defjvp(lambda xs, ts: (xs[0], ts[0]))
    # Of all of the time, half of which it would not take.
    a_mean = lambda w, x: opaque(jnp.dot(np.float32(range(TIME)), x @ w) ** 2).mean()
    compared = lambda w, x: (opaque(x @ w) - opaque(x @ w).mean(1, keepdims=True)).std()
    w, x = np.ones(WIDTH, np.float32), BATCHES[0]["x"]
    step = sgd_step(a_mean, 0.01, 4, batch_axis=1)
    state = train(step, step.init(w), [x])
    assert_close(step.model(state), on_one_device(a_mean, optax.sgd(0.01), w, [x])[0])
    step = sgd_step(compared, 0.01, 4, batch_axis=1)
    with pytest.raises(LossError):
        step(step.init(w), x)


# Data sets.


def batches_of(*sizes: int) -> list[dict[str, Any]]:
    return [batch_of(rows, heat) for rows, heat in zip(sizes, (2.0, 0.5, 1.0), strict=False)]


def joined(metric: Any, batches: Any) -> Any:
    """The values of all rows of all batches on one device."""
    values = [jax.tree.map(np.float64, metric(PARAMS, batch)) for batch in batches]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *values)


def metric_of(params: Any, batch: Any) -> dict[str, jax.Array]:
    right = states_of(params, batch["x"])[-1] @ params["out"] / batch["heat"]
    return {"out": right[:, 0], "tokens": batch["words"].T * 1.0}


@pytest.mark.parametrize("options", [{}, deep({"loss_over": "batch"})], ids=str)
def test_a_metric_is_the_mean_of_all_rows(options: dict[str, Any]):
    step = sgd_step(recurrent, 0.1, 4, batch_axis=AXES, **options)
    batches = batches_of(5, 12, 3)
    found = step.evaluate(step.init(PARAMS), batches, metric_of)
    assert_close(found, jax.tree.map(lambda x: x.mean(0), joined(metric_of, batches)), rtol=1e-5)


def test_tokens_of_a_time_major_batch_count_by_their_own_weight():
    axes = {"x": 1, "mask": 1}
    loss = lambda w, b: ((b["x"] @ w) * b["mask"]).sum() / b["mask"].sum()
    metric = lambda w, b: {"token": (b["x"] @ w).T, "row": b["x"].sum((0, 2))}
    w = np.arange(WIDTH, dtype=np.float32)
    batches = [{name: batch[name] for name in axes} for batch in batches_of(5, 12)]
    x, mask = (np.concatenate([b[name] for b in batches], 1) for name in axes)
    expected = {
        "token": np.average(x @ w, weights=mask),
        "row": np.average(x.sum((0, 2)), weights=mask.sum(0)),
    }
    step = sgd_step(loss, 0.1, 4, batch_axis=1, weight="mask")
    assert_close(step.evaluate(step.init(w), batches, metric), expected, rtol=1e-4)
    # A function counts the tokens of each row.
    step = sgd_step(loss, 0.1, 4, batch_axis=axes, weight=lambda b: b["mask"][1:].sum())
    rows = lambda w, b: metric(w, b)["row"]
    found = step.evaluate(step.init(w), batches, rows)
    of_rows = np.average(x.sum((0, 2)), weights=mask[1:].sum(0))
    np.testing.assert_allclose(found, of_rows, rtol=1e-4)


def test_predictions_come_in_the_order_of_the_rows():
    step = sgd_step(recurrent, 0.1, 4, batch_axis=AXES)
    batches = batches_of(5, 12, 3)
    placed = jax.device_put(
        batches[1]["x"], NamedSharding(step.mesh, P(None, step.mesh.axis_names))
    )
    found = step.predict(
        step.init(PARAMS), [batches[0], batches[1] | {"x": placed}, batches[2]], metric_of
    )
    assert_close(found, joined(metric_of, batches), rtol=1e-5)


# Other ways in.


def summed(w: Any, x: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)


def test_a_runner_splits_along_any_axis():
    x, y = BATCHES[0]["x"], np.float32(RNG.normal(size=(ROWS, TIME)))
    one_of = lambda x, y: (x.sum(2) * y.T).sum() * jnp.ones(1)
    for axes in ([1, 0], (1, -2)):
        found = crossshard.shard(one_of, [x, y], num_shards=4, batch_axis=axes)
        expected = [(x[:, r : r + 2].sum(2) * y[r : r + 2].T).sum() for r in range(0, ROWS, 2)]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    both = lambda batch: one_of(batch["x"], batch["y"]) * batch["heat"]
    run = crossshard.shard(num_shards=4, batch_axis=[{"x": 1, "y": 0, "heat": None}])(both)
    found = run({"x": x, "y": y, "heat": 2.0})
    np.testing.assert_allclose(found, 2 * np.float64(expected), rtol=1e-5)
    of_all = crossshard.shard(num_shards=4, batch_axis=1)(lambda x, y: one_of(x, y.T))
    np.testing.assert_allclose(of_all(x, y=y.T), expected, rtol=1e-5)


def test_variables_train_on_time_major_batches():
    from flax import nnx

    x, y = BATCHES[0]["x"], np.float32(RNG.normal(size=ROWS))
    loss = lambda w, x, y: ((jnp.tanh(jnp.cumsum(x @ w, 0)).sum(0) - y) ** 2).mean()
    w, opt = nnx.Param(jnp.ones(WIDTH)), CrossShardOptimizer(optax.sgd(0.01))

    @crossshard.shard(num_shards=4, batch_axis=[None, None, 1, 0])
    def step(w: Any, opt: Any, x: Any, y: Any) -> None:
        opt.minimize(lambda: loss(w[...], x, y), var_list=[w])

    for _ in range(2):
        step(w, opt, x, y)
    plain = jnp.ones(WIDTH)
    for _ in range(2):
        plain -= 0.01 * jax.grad(loss)(plain, x, y)
    assert_close(w[...], plain)


def own_step(factor: Callable[[int], Any]) -> Any:
    """A step of the user's own on ``[time, rows, …]``, whose gradient is off by a factor."""

    def make_step(optimizer: Any, number: int) -> Any:
        mesh = jax.make_mesh(
            (number,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:number]
        )

        def of_shard(w: Any, x: Any, y: Any) -> Any:
            loss = lambda w: ((jnp.tanh(jnp.cumsum(x @ w, 0)).sum(0) - y) ** 2).mean()
            return factor(number) * jax.lax.pmean(jax.grad(loss)(w), "data")

        gradient = jax.shard_map(
            of_shard,
            mesh=mesh,
            in_specs=(P(), P(None, "data"), P("data")),
            out_specs=P(),
            check_vma=False,
        )

        @jax.jit
        def step(w: Any, state: Any, x: Any, y: Any) -> Any:
            updates, state = optimizer.update(gradient(w, x, y), state, w)
            return optax.apply_updates(w, updates), state

        w = jnp.ones(WIDTH) / 8
        return step, w, optimizer.init(w)

    return make_step


def test_verify_takes_rows_along_their_axis():
    # Rows that differ, or any of them would do.
    x = RNG.normal(size=(3, 16, WIDTH)).astype(np.float32) * np.linspace(0.2, 2, 16)[:, None]
    y = np.linspace(-1, 1, 16, dtype=np.float32)
    of = lambda factor: crossshard.verify(
        own_step(factor), np.float32(x), y, num_shards=4, batch_axis=[1, 0]
    )
    assert of(lambda number: 1).ok
    (fault,) = of(lambda number: number).faults
    assert "4.000 = N" in fault.sentence


def test_verify_takes_the_axes_of_a_step():
    step = sgd_step(recurrent, 0.1, 4, batch_axis=AXES)
    # As many rows as the table has, which stays whole.
    batch = batch_of(WORDS * 2) | {"table": np.ones((WORDS * 2, WIDTH), np.float32)}
    found = crossshard.verify(step, PARAMS, batch)
    assert found.ok
    assert "on 4 shards and 12 rows" in str(found)
    with pytest.raises(ArgumentError, match="has its own batch_axis"):
        crossshard.verify(step, PARAMS, batch, batch_axis=1)


# Refusals.

X = {"x": np.ones((3, 8, WIDTH), np.float32), "y": np.ones(8, np.float32)}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"batch_axis": True}, ArgumentTypeError, r"batch_axis is an int.*got True \(bool\)"),
        ({"batch_axis": {"x": 1.0}}, ArgumentTypeError, r"got 1.0 \(float\)"),
        ({"batch_axis": "x"}, ArgumentTypeError, r"got 'x' \(str\)"),
        ({"batch_axis": None}, ArgumentError, "batch_axis=None has no axis"),
        ({"batch_axis": {"x": None, "y": None}}, ArgumentError, "has no axis, so that every"),
        (
            {"batch_axis": {"x": 1, "y": 0}, "replicated_entries": ["y"]},
            ArgumentError,
            r"replicated_entries=\('y',\) says it again.*Write None in batch_axis",
        ),
        (
            {"batch_axis": {"x": 1, "y": None}, "weight": "y"},
            ArgumentError,
            "'y' is the weight.*Write its axis",
        ),
    ],
    ids=str,
)
def test_what_is_no_axis(options: dict[str, Any], error: type, said: str):
    with pytest.raises(error, match=said):
        sgd_step(lambda w, b: w, 0.1, 2, **options)


@pytest.mark.parametrize(
    ("axes", "batch", "said"),
    [
        (1, X, r"batch\['y'\] has shape \(8,\) and no axis 1 to split along.*batch_axis="),
        ({"x": -4, "y": 0}, X, r"batch\['x'\] has shape \(3, 8, 4\) and no axis -4"),
        ({"x": 1}, X, r"batch_axis=\{'x': 1\} does not fit batch, which is \{'x': \*, 'y'"),
        ([1, 0], X, r"batch_axis=\[1, 0\] does not fit batch"),
        ({"x": (1, 0), "y": 0}, X, "does not fit"),
        ({"x": 0, "y": 0}, X, r"along axes 0 and 0; got \[3, 8\]: batch\['x'\] has 3, and.* 8\."),
        (
            {"x": 1, "y": 0},
            {**X, "y": 2.0},
            r"\['y'\] is a scalar.*write None for it in batch_axis",
        ),
        ({"x": 1, "y": None}, {**X, "y": "words"}, r"\['y'\] must be an array or a number"),
        ({"x": 1, "y": 0}, {**X, "x": X["x"][:, :0]}, r"\['x'\] has 0 rows"),
        ({"x": 1, "y": 0}, {"x": X["x"][:, :7], "y": X["y"][:7]}, r"\['x'\] has 7 rows.*2 shards"),
        ({"x": {"inner": 1}, "y": None}, {"x": {}, "y": X["y"]}, "does not fit"),
        ({"x": 1, "y": None}, {"x": {}, "y": X["y"]}, "no array that is split"),
    ],
    ids=range(12),
)
def test_what_does_not_fit_the_batch(axes: Any, batch: Any, said: str):
    loss = lambda w, batch: w * (batch["x"].mean() + batch["y"].mean())
    step = sgd_step(loss, 0.1, 2, batch_axis=axes)
    state = step.init(jnp.float32(1))
    for call in (step, step.lower):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=said):
            call(state, batch)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"batch_axis": 2}, ArgumentError, r"input 1 has shape \(8, 3\) and no axis 2"),
        ({"batch_axis": [1]}, ArgumentError, "batch_axis has 1 entries for 2 inputs; pass one per"),
        ({"batch_axis": [None, None]}, ArgumentError, "has no axis"),
        ({"batch_axis": [1, False]}, ArgumentTypeError, "got False"),
        ({"batch_axis": [{"x": 1}, 0]}, ArgumentError, "does not fit input 0, which is one array"),
        ({"batch_axis": 1, "input_shard_axes": [1, 0]}, ArgumentError, "say the same"),
        ({"batch_axis": [0, 0]}, ArgumentError, "input 0 and input 1 .*3 and 8"),
    ],
    ids=str,
)
def test_what_a_runner_refuses(options: dict[str, Any], error: type, said: str):
    with pytest.raises(error, match=said):
        crossshard.shard(lambda x, y: x.sum(), [X["x"], np.ones((8, 3), np.float32)], 1, **options)


@pytest.mark.parametrize("name", ["batch_axis", "input_shard_axes"])
def test_an_array_by_keyword_has_no_place_in_a_list(name: str):
    run = crossshard.shard(num_shards=2, **{name: [1]})(lambda x, y: x.sum() + y.sum())
    with pytest.raises(ArgumentError, match=r"none for input 'y'\. Pass it by position"):
        run(X["x"], y=X["y"])


# Several processes, each with its own rows.


def of_job(shards: int, take: Callable[[Any], Any]) -> dict[str, Any]:
    """What a step makes of the rows that ``take`` leaves of each batch."""
    found: dict[str, Any] = {}
    for name, options in (
        ("rows", {}),
        ("padded", {"weight": weight_of}),
        ("batch", {"loss_over": "batch"}),
    ):
        loss = masked if name == "padded" else recurrent
        step = make_train_step(
            loss, optax.sgd(0.1), num_shards=shards, batch_axis=AXES, params="sharded", **options
        )
        # With weights a process may pass another number of rows than the other.
        sizes = (10, 7) if name == "padded" else (8, 8)
        batches = [batch_for_job(*each) for each in enumerate(sizes)]
        state = train(step, step.init(PARAMS), map(take, batches))
        found[name] = jax.tree.map(lambda x: np.asarray(x).tolist(), step.unshard(state).params)
        if name == "rows":
            data = [batch_for_job(*each) for each in enumerate((8, 7))]
            found["mean"] = step.evaluate(state, map(take, data), metric_of)["out"].tolist()
            rows = step.predict(state, map(take, data), metric_of)
            found["predicted"] = rows["out"].tolist()
    return found


def batch_for_job(number: int, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    batch = batch_of(rows)
    for name in ("x", "image"):
        batch[name] = rng.normal(size=batch[name].shape).astype(np.float32)
    batch["words"] = rng.integers(0, WORDS, size=(TIME, rows))
    batch["mask"] = (rng.uniform(size=(TIME, rows)) < 0.7).astype(np.float32)
    batch["label"] = rng.integers(0, WORDS, size=rows)
    return batch


def main(process: int, port: int, out: str) -> None:
    """One process of the job."""
    join(process, port)

    def take(batch: Any) -> Any:
        def own(x: Any, axis: int | None) -> Any:
            if axis is None:
                return x
            return np.array_split(x, PROCESSES, axis)[process]

        return {name: own(x, AXES[name]) for name, x in batch.items()}

    Path(out).write_text(json.dumps(of_job(PROCESSES * DEVICES, take)))
    jax.distributed.shutdown()


@pytest.mark.multiprocess
@pytest.mark.deep
def test_processes_pass_their_own_rows(tmp_path: Path):
    of_each = run_processes("step.test_batch_axis", tmp_path)
    for name, loss, sizes in (
        ("rows", recurrent, (8, 8)),
        ("padded", masked, (10, 7)),
        ("batch", recurrent, (8, 8)),
    ):
        batches = [batch_for_job(*each) for each in enumerate(sizes)]
        expected, _ = on_one_device(loss, optax.sgd(0.1), PARAMS, batches)
        for found in of_each:
            assert_close(jax.tree.map(np.float32, found[name], is_leaf=_is_list), expected)
        if name == "rows":
            data = [batch_for_job(*each) for each in enumerate((8, 7))]
            outs = [np.asarray(metric_of(expected, batch)["out"]) for batch in data]
            for process, found in enumerate(of_each):
                np.testing.assert_allclose(found["mean"], np.concatenate(outs).mean(), rtol=1e-4)
                own = np.concatenate([np.array_split(x, PROCESSES)[process] for x in outs])
                np.testing.assert_allclose(found["predicted"], own, rtol=1e-4, atol=1e-5)


def _is_list(x: Any) -> bool:
    return isinstance(x, list)
