"""The flags of make_train_step's options: those that need another one, and all of them together."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import optax
import pytest

import crossshard
from examples.byte_lm.__main__ import main
from examples.byte_lm.job import Job, prepare
from tests.examples.byte_lm.small import SMALL, check_picture, read_metrics, small_options

RATE = 0.1


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
