"""batch_axis, replicated_entries: rows along any axis, and entries that every shard gets whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.errors import ArgumentError, ArgumentTypeError, LossError
from tests.processes import DEVICES, PROCESSES, join, run_processes
from tests.quick import deep, deep_but
from tests.step.common import assert_close, follows_one_device, on_one_device, sgd_step, train

RNG = np.random.default_rng(0)
# As many steps of time as rows, so that no shape tells one from the other.
ROWS = TIME = 8
WIDTH, WORDS = 4, 6
PARAMS = {
    "in": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2,
    "state": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2,
    "out": RNG.normal(size=(WIDTH, WORDS)).astype(np.float32) / 2,
}
AXES = {"x": 1, "words": -1, "mask": 1, "label": 0, "image": 3, "table": None, "heat": None}
SGD = optax.sgd(0.1)


def batch_of(rows: int, heat: Any = 2.0, rng: Any = RNG) -> dict[str, Any]:
    return {
        "x": rng.normal(size=(TIME, rows, WIDTH)).astype(np.float32),
        "words": rng.integers(0, WORDS, size=(TIME, rows)),
        "mask": (rng.uniform(size=(TIME, rows)) < 0.7).astype(np.float32),
        "label": rng.integers(0, WORDS, size=rows),
        "image": rng.normal(size=(3, 3, WIDTH, rows)).astype(np.float32),
        "table": np.linspace(-1, 1, WORDS * WIDTH, dtype=np.float32).reshape(WORDS, WIDTH),
        "heat": heat,
    }


BATCHES = [batch_of(ROWS, heat) for heat in (2.0, np.float32(0.5))]
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


WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (recurrent, {}),
    "microbatches": (last, {"accumulate_steps": 2}),
    "batch in microbatches": (language, {"loss_over": "batch", "accumulate_steps": 2}),
    "batch sharded": (recurrent, {"loss_over": "batch", "params": "sharded"}),
}


@pytest.mark.parametrize("way", deep_but([*WAYS][:3:2], WAYS))
def test_rows_along_any_axis_step_as_on_one_device(way: str):
    loss, options = WAYS[way]
    follows_one_device(loss, SGD, PARAMS, BATCHES, num_shards=4, batch_axis=AXES, **options)


def weight_of(batch: Any) -> jax.Array:
    return batch["mask"][1:].sum()


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, deep({"params": "sharded"})], ids=str)
def test_uneven_rows_are_padded_with_weights(options: dict[str, Any]):
    options = {"num_shards": 4, "batch_axis": AXES, "weight": weight_of} | options
    follows_one_device(masked, SGD, PARAMS, UNEVEN, **options)


def test_one_axis_of_all_with_names_of_what_is_whole():
    loss = lambda w, batch: jnp.tanh(batch["x"] @ w / batch["heat"]).mean()
    batches = [{"x": each["x"], "heat": each["heat"]} for each in BATCHES]
    options = {"num_shards": 4, "batch_axis": 1, "replicated_entries": ("heat",)}
    step, _ = follows_one_device(loss, SGD, PARAMS["in"], batches, **options)
    # A number is an argument.
    assert step._program._compiled._cache_size() == 1


def test_every_shard_has_its_rows_and_whole_entries_are_everywhere():
    step = sgd_step(recurrent, 0.1, 4, batch_axis=AXES)
    abstract = step._program.placer.abstract(batch_of(12))
    shapes = {name: x.sharding.shard_shape(x.shape) for name, x in abstract.items()}
    assert shapes["x"] == (TIME, 3, WIDTH)
    assert shapes["words"] == (TIME, 3)
    assert shapes["image"] == (3, 3, WIDTH, 3)
    assert (shapes["label"], shapes["table"], shapes["heat"]) == ((3,), (WORDS, WIDTH), ())
    # What lies on the mesh so is not moved.
    one, two = (step._program.placer(batch) for batch in [batch_of(12)] * 2)
    again = step._program.placer(one)
    assert all(again[name] is one[name] for name in one)
    assert_close(one, two)


def test_the_last_axis_is_another_one_where_an_array_has_more():
    place = sgd_step(last, 0.1, 4, batch_axis=-1)._program.placer
    one = place(place(np.arange(8.0)))
    assert place(one) is one
    two = jax.device_put(np.ones((8, 8)), one.sharding)
    assert place(two).sharding.shard_shape((8, 8)) == (8, 2)


def test_what_processes_tell_each_other_of_a_batch():
    batch = {"x": np.ones((TIME, 12, WIDTH), np.float32), "y": np.ones(12), "table": np.ones(3)}
    for weight, rows in ((None, "12"), ("y", "any")):
        axes = {"x": 1, "y": 0, "table": None}
        step = sgd_step(recurrent, 0.1, 4, batch_axis=axes, weight=weight)
        told = step._program.placer.rows_of(batch)
        # Dtypes as on the devices, where those of one process may be already.
        assert told == f"float32[3],float32[8,{rows},4],float32[{rows}]"


def test_what_is_of_the_rows_alone_counts_them():
    # The table comes first in the batch, and its five rows do not divide.
    batch = {
        "a table": np.float32(RNG.normal(size=(5, WIDTH))),
        "x": np.float32(RNG.normal(size=(3, 16, WIDTH))),
    }
    loss = lambda w, batch: jnp.tanh(batch["x"] @ (w + batch["a table"].sum(0))).mean()
    w, options = np.ones(WIDTH, np.float32), {"metrics": ("noise_variance",)}
    step = sgd_step(
        loss,
        0.1,
        4,
        batch_axis={"a table": None, "x": 1},
        accumulate_steps=2,
        **options,
    )
    state, metrics = step(step.init(w), batch)
    of_rows = lambda rows: np.float64(
        jax.jit(jax.grad(loss))(w, {**batch, "x": batch["x"][:, rows]})
    )
    gradient = of_rows(slice(None))
    np.testing.assert_allclose(step.model(state), w - 0.1 * gradient, rtol=1e-5)
    of_shards = np.mean([(of_rows(slice(s, s + 4)) ** 2).sum() for s in range(0, 16, 4)])
    variance = (of_shards - (gradient**2).sum()) / (1 / 4 - 1 / 16)
    np.testing.assert_allclose(metrics["noise_variance"], variance, rtol=1e-4)


def test_no_two_rows_have_the_same_noise():
    drawn = lambda w, x, keys: ((w * x).mean(), jax.vmap(jax.random.normal)(keys))
    found = []
    for number in (1, 4):
        step = sgd_step(drawn, 0.1, number, rng_per="row", has_aux=True)
        _, metrics = step(step.init(np.float32(1), 3), np.ones(8, np.float32))
        found.append(np.ravel(metrics["aux"]))
    assert len({*found[0].tolist()}) == 8
    np.testing.assert_array_equal(*found)


# What the loss is in its rows.


def test_what_compares_rows_along_their_axis_is_refused():
    over_time = lambda w, x: ((x - x.mean(0)) @ w).std(0).mean()
    over_rows = lambda w, x: ((x - x.mean(1, keepdims=True)) @ w).std(1).mean()
    w, x = np.ones(WIDTH, np.float32), BATCHES[0]["x"]
    for axis, right, wrong in ((1, over_time, over_rows), (0, over_rows, over_time)):
        follows_one_device(right, SGD, w, [x], num_shards=4, batch_axis=axis)
        step = sgd_step(wrong, 0.1, 4, batch_axis=axis)
        with pytest.raises(LossError, match="compares rows"):
            step(step.init(w), x)


def test_a_loop_over_axis_0_names_the_option():
    step = sgd_step(lambda params, x: states_of(params, x)[-1].mean(), 0.1, 4)
    with pytest.raises(LossError, match=r"a row meets those before it.*write batch_axis=1"):
        step(step.init(PARAMS), BATCHES[0]["x"])


# Data sets.


def metric_of(params: Any, batch: Any) -> dict[str, jax.Array]:
    right = states_of(params, batch["x"])[-1] @ params["out"] / batch["heat"]
    return {"out": right[:, 0], "tokens": batch["words"].T * 1.0}


def test_a_data_set_is_evaluated_and_predicted_in_the_order_of_its_rows():
    step = sgd_step(recurrent, 0.1, 4, batch_axis=AXES)
    state = step.init(PARAMS)
    batches = [batch_of(rows, heat) for rows, heat in ((5, 2.0), (12, 0.5), (3, 1.0))]
    values = [jax.tree.map(np.float64, metric_of(PARAMS, batch)) for batch in batches]
    expected = jax.tree.map(lambda *parts: np.concatenate(parts), *values)
    found = step.evaluate(state, batches, metric_of)
    assert_close(found, jax.tree.map(lambda x: x.mean(0), expected), rtol=1e-5)
    own = NamedSharding(step.mesh, P(None, step.mesh.axis_names))
    batches[1]["x"] = jax.device_put(batches[1]["x"], own)
    assert_close(step.predict(state, batches, metric_of), expected, rtol=1e-5)


def test_tokens_of_a_time_major_batch_count_by_their_own_weight():
    axes = {"x": 1, "mask": 1}
    loss = lambda w, b: ((b["x"] @ w) * b["mask"]).sum() / b["mask"].sum()
    metric = lambda w, b: {"token": (b["x"] @ w).T, "row": b["x"].sum((0, 2))}
    w = np.arange(WIDTH, dtype=np.float32)
    batches = [{name: batch_of(rows)[name] for name in axes} for rows in (5, 5)]
    x, mask = (np.concatenate([b[name] for b in batches], 1) for name in axes)
    of_rows = lambda weights: np.average(x.sum((0, 2)), weights=weights)
    expected = {"token": np.average(x @ w, weights=mask), "row": of_rows(mask.sum(0))}
    step = sgd_step(loss, 0.1, 4, batch_axis=1, weight="mask")
    assert_close(step.evaluate(step.init(w), batches, metric), expected, rtol=1e-4)
    # A function counts the tokens of each row.
    step = sgd_step(loss, 0.1, 4, batch_axis=axes, weight=weight_of)
    found = step.evaluate(step.init(w), batches, lambda w, b: metric(w, b)["row"])
    np.testing.assert_allclose(found, of_rows(mask[1:].sum(0)), rtol=1e-4)


# Other ways in.


def test_a_runner_splits_along_any_axis():
    x, y = BATCHES[0]["x"], np.float32(RNG.normal(size=(ROWS, TIME)))
    one_of = lambda x, y: (x.sum(2) * y.T).sum() * jnp.ones(1)
    expected = [(x[:, r : r + 2].sum(2) * y[r : r + 2].T).sum() for r in range(0, ROWS, 2)]
    close = lambda found, factor=1: np.testing.assert_allclose(
        found, factor * np.float64(expected), rtol=1e-5
    )
    for axes in ([1, 0], (1, -2)):
        close(crossshard.shard(one_of, [x, y], num_shards=4, input_shard_axes=axes))
    both = lambda x, y, heat: one_of(x, y) * heat
    run = crossshard.shard(num_shards=4, input_shard_axes=[1, 0, None])(both)
    close(run(x, y, 2.0), 2)


# Refusals.

X = {"x": np.ones((3, 8, WIDTH), np.float32), "y": np.ones(8, np.float32)}


def making(**options: Any) -> Callable[[], Any]:
    return lambda: sgd_step(lambda w, b: w, 0.1, 2, **options)


def stepping(batch: Any, call: str = "__call__", **options: Any) -> Callable[[], Any]:
    def run() -> None:
        loss = lambda w, batch: w * (batch["x"].mean() + batch["y"].mean())
        step = sgd_step(loss, 0.1, 2, **options)
        getattr(step, call)(step.init(jnp.float32(1)), batch)

    return run


def running(**options: Any) -> Callable[[], Any]:
    given = [X["x"], np.ones((8, 3), np.float32)]
    return lambda: crossshard.shard(lambda x, y: x.sum(), given, 1, **options)


def by_keyword() -> None:
    of_both = crossshard.shard(num_shards=2, input_shard_axes=[1])(lambda x, y: x.sum() + y.sum())
    of_both(X["x"], y=X["y"])


XY = {"x": 1, "y": 0}
# fmt: off
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (making(batch_axis=True), r"batch_axis is an int.*got True \(bool\)"),
    (making(batch_axis={"x": 1.0}), r"got 1.0 \(float\)"),
    (making(batch_axis="x"), r"got 'x' \(str\)"),
    (making(batch_axis=None), "batch_axis=None has no axis"),
    (making(batch_axis={"x": None, "y": None}), "has no axis, so that every"),
    (making(batch_axis=XY, replicated_entries=["y"]),
     r"replicated_entries=\('y',\) says it again.*Write None in batch_axis"),
    (making(batch_axis={"x": 1, "y": None}, weight="y"), "'y' is the weight.*Write its axis"),
    (making(replicated_entries="y"), r"tuple of names.*'y'"),
    # What does not fit the batch.
    (stepping(X, replicated_entries=("other",)), r"\('other',\).*the batch has \['x'"),
    (stepping({**X, "y": 2.0}), r"y.*is a scalar.*replicated_entries"),
    (stepping(X, batch_axis=1), r"batch\['y'\] has shape \(8,\) and no axis 1 to split.*batch_"),
    (stepping(X, batch_axis={"x": -4, "y": 0}),
     r"batch\['x'\] has shape \(3, 8, 4\) and no axis -4"),
    (stepping(X, batch_axis={"x": 1}),
     r"batch_axis=\{'x': 1\} does not fit batch, which is \{'x': \*"),
    (stepping(X, "lower", batch_axis={"x": 0, "y": 0}),
     r"along axes 0 and 0; got \[3, 8\]: batch\['x'\] has 3, and.* 8\."),
    (stepping({**X, "y": "words"}, batch_axis={"x": 1, "y": None}),
     r"\['y'\] must be an array or a"),
    (stepping({**X, "x": X["x"][:, :0]}, batch_axis=XY), r"\['x'\] has 0 rows"),
    (stepping({"x": X["x"][:, :7], "y": X["y"][:7]}, batch_axis=XY),
     r"\['x'\] has 7 rows.*2 shards"),
    (stepping({**X, "x": {}}, "lower", batch_axis={"x": 1, "y": None}), "no array that is split"),
    # What a runner refuses.
    (running(input_shard_axes=[1, 2]), r"input 1 has shape \(8, 3\) and no axis 2"),
    (running(input_shard_axes=[1, False]), "list of ints.*False"),
    (running(), "input 0 and input 1 .*3 and 8"),
    (by_keyword, r"none for input 'y'\. Pass it by position"),
]
# fmt: on


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(call: Callable[[], Any], said: str):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=said):
        call()


# Several processes, each with its own rows: with weights, other numbers of them.


def batches_for_job() -> list[dict[str, Any]]:
    """The same in every process."""
    rng = np.random.default_rng(7)
    return [batch_of(rows, rng=rng) for rows in (10, 7)]


def main(process: int, port: int, out: str) -> None:
    """One process of the job."""
    join(process, port)

    def take(batch: Any) -> Any:
        own = lambda x, axis: np.array_split(x, PROCESSES, axis)[process]
        return {name: x if AXES[name] is None else own(x, AXES[name]) for name, x in batch.items()}

    options = {"batch_axis": AXES, "params": "sharded", "weight": weight_of}
    step = sgd_step(masked, 0.1, PROCESSES * DEVICES, **options)
    own = [take(batch) for batch in batches_for_job()]
    state = train(step, step.init(PARAMS), own)
    params = step.unshard(state).params
    found = {name: np.asarray(x).tolist() for name, x in params.items()}
    found["predicted"] = np.asarray(step.predict(state, own, metric_of)["out"]).tolist()
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


@pytest.mark.multiprocess
@pytest.mark.deep
def test_processes_pass_their_own_rows(tmp_path: Path):
    expected, _ = on_one_device(masked, SGD, PARAMS, batches_for_job())
    outs = [np.asarray(metric_of(expected, batch)["out"]) for batch in batches_for_job()]
    for process, found in enumerate(run_processes("step.test_batch_axis", tmp_path)):
        own = np.concatenate([np.array_split(x, PROCESSES)[process] for x in outs])
        np.testing.assert_allclose(found.pop("predicted"), own, rtol=1e-4, atol=1e-5)
        assert_close({name: np.float32(x) for name, x in found.items()}, expected)
