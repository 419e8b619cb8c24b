"""The flags of make_train_step's options: a run with them trains as numpy says that one does."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from examples.byte_lm.__main__ import main
from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.job import Job, prepare
from examples.byte_lm.model import ByteTransformer, nats
from tests.examples.byte_lm.small import SMALL, check_picture, read_metrics, small_options
from tests.examples.byte_lm.test_held_out import by_hand

RATE, STEPS = 0.1, 3


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files so short that many rows end with theirs."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(100):
        (folder / f"{number}.txt").write_text(f"{number} sheep jumped over {number % 7} fences.\n")
    return folder


def job_of(text: Path, **flags: Any) -> Job:
    options = small_options(text.parent, optimizer="sgd", learning_rate=RATE, **flags)
    return prepare(dataclasses.replace(options, data=text, out=text.parent / "out"))


def trained(job: Job) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """The parameters after some steps, and the metrics of each."""
    training = job.new_training()
    metrics = [training(batch) for batch in itertools.islice(job.batches(), STEPS)]
    masters = optax.tree.get(training.step.unshard(training.state).opt_state, "masters")
    values = named(nnx.state(training.step.model(training.state)))
    return (values if masters is None else named(masters)), metrics


def named(params: Any) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(params)
    return {"/".join(map(str, path)): np.float32(leaf.get_raw_value()) for path, leaf in flat}


def with_values(model: ByteTransformer, values: dict[str, np.ndarray]) -> ByteTransformer:
    """A copy of a model with other parameters."""
    copy = nnx.clone(model)
    for path, variable in nnx.to_flat_state(nnx.state(copy)):
        variable.set_value(values["/".join(map(str, path))])
    return copy


def by_one(job: Job, chosen: str = "") -> list[dict[str, np.ndarray]]:
    """The parameters before and after each step of plain SGD on one device, in float32.

    Only those with ``chosen`` in their names are trained; only bytes that count are counted.
    """
    create = lambda: ByteTransformer(layers=1, width=32, rngs=nnx.Rngs(0))
    graph, params = nnx.split(nnx.eval_shape(create))
    paths = [path for path, _ in nnx.to_flat_state(params)]

    @jax.jit
    @jax.grad
    def gradient(values: dict[str, Any], batch: Any) -> Any:
        leaves = zip(paths, (nnx.Param(x) for x in values.values()), strict=True)
        model = nnx.merge(graph, nnx.from_flat_state(leaves))
        return nats(model, batch["read"], batch["wanted"]).mean(where=batch["counts"] > 0)

    path = [named(nnx.state(job.first_model))]
    for batch in itertools.islice(job.batches(), STEPS):
        slopes = gradient(path[-1], {"counts": np.ones(batch["read"].shape), **batch})
        moved = {name: RATE * np.asarray(slope) for name, slope in slopes.items()}
        path.append({n: x - moved[n] * (chosen in n) for n, x in path[-1].items()})
    return path


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The norm of the difference."""
    assert one.keys() == other.keys()
    return math.hypot(*(np.linalg.norm(np.float64(one[n]) - other[n]) for n in one))


EXACT, OF_16_BITS = 1e-4, 2e-2
HALF = {"dtype": "bfloat16", "param_dtype": "bfloat16", "master_dtype": "float32"}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("flags", "chosen", "within", "described"),
    [
        (
            {"accumulate_steps": 4, "weight_update": "sharded"},
            "",
            EXACT,
            "4 microbatches.* sharded update",
        ),
        ({"weight": True, "batch": 9}, "", EXACT, "weigh"),
        ({"virtual_shards": 16, "batch": 32}, "", EXACT, "as 16 virtual shards"),
        ({"wrt": "blocks/*", "params": "sharded"}, "blocks/", EXACT, "frozen"),
        ({"reduce_dtype": "bfloat16"}, "", OF_16_BITS, "in bfloat16"),
        (HALF, "", OF_16_BITS, "float32 masters"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_with_a_flag_shards_train_as_one_device_does(text, flags, chosen, within, described):
    job = job_of(text, **flags)
    assert re.search(described, job.step.describe())
    values, metrics = trained(job)
    path = by_one(job, chosen)
    assert not any(each.get("skipped", 0) for each in metrics)
    assert distance(values, path[-1]) < within * distance(path[0], path[-1])
    if "reduce_dtype" in flags:
        assert crossshard.inspect(job.lowered).ratio == pytest.approx(0.5, rel=0.01)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("flags", "described"),
    [
        ({"reduce_dtype": "int4", "rounding": "stochastic"}, "in int4, rounded at random"),
        (
            {"sync_every": 2, "outer_reduce_dtype": "int8"},
            "every 2 steps the mean over the workers",
        ),
        # What all have in common is one step behind, or with two pieces half of the way.
        ({"sync_every": 1, "sync_streaming": True}, "every step the mean over the workers, beside"),
    ],
)
def test_with_a_flag_shards_train_nearly_as_one_device_does(text, flags, described):
    job = job_of(text, shards=2, **flags)
    assert described in job.step.describe()
    # One shard takes other steps, so the run does not compare with it.
    assert job.options.unlike_one_shard()
    after, metrics = trained(job)
    start, *_, end = by_one(job)
    assert len(metrics) == STEPS
    assert 0 < distance(after, end) < 0.5 * distance(start, end)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"rounding": "stochastic"}, "are for --reduce-dtype int8"),
        ({"workers": 2}, "are for --sync-every"),
        ({"sync_streaming": True}, "are for --sync-every"),
        ({"sync_every": 2, "workers": 3, "shards": 2}, "split evenly over --workers 3"),
    ],
)
def test_flags_that_need_another_one_say_so(text, flags, why):
    with pytest.raises(crossshard.errors.ArgumentError, match=why):
        job_of(text, **flags)


@pytest.mark.deep
def test_the_average_is_evaluated_and_the_norm_is_of_the_gradient(text):
    job = job_of(text, ema=0.5, metrics=("grad_norm",))
    path = by_one(job)
    training, held_out = job.new_training(), HeldOut(job.text.held_out, job.options.context)
    average = path[0]
    for batch, before, after in zip(job.batches(), path, path[1:], strict=False):
        norm = training(batch)["grad_norm"]
        assert norm == pytest.approx(distance(before, after) / RATE, rel=1e-4)
        average = {name: 0.5 * average[name] + 0.5 * after[name] for name in average}
    for values, ema in ((path[-1], False), (average, True)):
        model = with_values(job.first_model, values)
        expected = by_hand(model, job.text.held_out, job.options.context)
        assert held_out.bits_per_byte(training, ema=ema) == pytest.approx(expected, rel=1e-5)


def scheduled() -> optax.GradientTransformation:
    """An optimizer that tells its learning rate."""
    return optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.0, 10))


@pytest.mark.deep
def test_all_flags_go_together_on_the_screen_and_in_the_record(text, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--data", str(text), "--out", str(out), *SMALL, "--steps", "3"]
    words += ["--optimizer", f"{__name__}:scheduled", "--metrics", "grad_norm", "learning_rate"]
    words += ["--shards", "2", "--weight-update", "sharded", "--weight"]
    words += ["--batch", "9", "--accumulate-steps", "2", "--wrt", "*kernel", "--ema", "0.9"]
    words += ["--dtype", "float16", "--param-dtype", "bfloat16", "--master-dtype", "float32"]
    words += ["--reduce-dtype", "bfloat16", "--loss-scale", "dynamic"]
    assert main(words) == 0
    said = capsys.readouterr().out
    line = r"step 3/3  loss .* grad_norm \S+  learning_rate \S+  loss_scale \S+  skipped 0 "
    assert re.search(line, said), said
    assert re.search(r"held-out +\S+ bits per byte, \S+ with averaged", said)
    assert re.search(
        r"sent +[\d,]+ bytes by each device in a step, 1\.\d+ of what a plain sum", said
    )
    metrics = read_metrics(out)
    assert all(0 < each["grad_norm"] < 10 for each in metrics if not each["skipped"])
    rates = [each["learning_rate"] for each in metrics]
    assert sorted(rates, reverse=True) == rates
    assert rates[0] == pytest.approx(0.1)
    assert 0.07 < rates[-1] < 0.1
    assert all(len(each["loss_per_shard"]) == 2 for each in metrics)
    assert metrics[-1]["held_out_bits_per_byte_ema"] != metrics[-1]["held_out_bits_per_byte"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["held_out_bits_per_byte_ema"] > 0
    assert json.loads((out / "options.json").read_text())["ema"] == 0.9
    check_picture(out / "curves.png")
