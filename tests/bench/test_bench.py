"""The bench runs, at sizes that measure nothing, and leaves what it says it leaves."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossshard.bench.floor import least_bytes, measure_bandwidth
from crossshard.bench.given_gradients import given_gradients
from crossshard.bench.jax_rivals import hand_written, ours
from crossshard.bench.models import mlp, transformer
from crossshard.bench.timing import Timing
from crossshard.bench.turns import take_turns
from crossshard.cli import main

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("bench", ["update", "step", "overhead", "import"])
def test_a_bench_leaves_a_page_a_plot_and_its_times(
    bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "new" / "folder"
    words = [bench, "--quick", "--rounds", "2", "--shards", "2", "--out", str(out)]
    assert main(["bench", *words, "--peers", str(tmp_path)]) == 0
    page = (out / f"{bench}.md").read_text(encoding="utf-8")
    assert "Run with `--quick`" in page
    assert f"![The same as a plot]({bench}.png)" in page
    assert f"JAX {jax.__version__}" in page or jax.__version__ in page
    assert (out / f"{bench}.png").read_bytes().startswith(PNG)
    times = json.loads((out / f"{bench}.json").read_text(encoding="utf-8"))
    for result in times["results"]:
        assert all(len(seconds) == 2 for seconds in result["timing"]["seconds"].values())
    printed = capsys.readouterr()
    assert str(out) in printed.out
    left_out = re.findall(r"is left out", printed.out + printed.err + page)
    # A peer that is not there is said to be missing, and has no row.
    assert bool(left_out) == (bench == "update")
    assert "gloo" not in page.split("## How it was measured")[0] or bench != "update"


@pytest.mark.parametrize("shards", [1, 8])
def test_rivals_solve_the_same(shards: int):
    for problem in (
        given_gradients(3, 64, shards),
        mlp(20_000, shards),
        transformer(shards, layers=1, width=32),
    ):
        rivals = [
            ours(problem, shards, "sharded"),
            ours(problem, shards, "replicated"),
            ours(problem, shards, "auto"),
            hand_written(problem, shards),
        ]
        timing, differences = take_turns(rivals, 2, lambda _: None)
        assert set(timing.seconds) == {rival.name for rival in rivals}
        assert max(differences.values()) < 1e-5


def test_ratios_are_taken_within_rounds():
    timing = Timing(1, {"ours": [1.0, 10.0, 3.0], "theirs": [2.0, 20.0, 6.0]})
    ratio = timing.ratio("ours", "theirs")
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_the_floor_counts_each_byte_that_must_move():
    # Eight gradients read, eight copies written; parameters and moments read, moments written.
    assert least_bytes(1000, 8) == (8 + 8 + 3 + 2) * 1000 * 4
    assert measure_bandwidth() > 1e8


def test_given_gradients_are_the_batch():
    problem = given_gradients(2, 4, 2)
    params = [jnp.ones((4, 4))] * 2
    part = [jnp.asarray(x[:4]) for x in problem.batch]
    gradients = jax.grad(problem.loss_fn)(params, part)
    for gradient, given in zip(gradients, part, strict=True):
        np.testing.assert_array_equal(gradient, given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "1"], "--rounds must be at least 2"),
        (["--shards", "0"], "--shards must be from 1 to 64"),
        (["nothing"], "nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert "Traceback" not in printed.err + printed.out


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["bench", "overhead", "--out", str(file / "below")]) == 2
    assert "file" in capsys.readouterr().err
