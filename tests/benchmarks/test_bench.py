"""The bench runs, at sizes that measure nothing, and leaves what it says it leaves."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import accumulation, ema, parts
from benchmarks.__main__ import main
from benchmarks.baselines import (
    GSPMD,
    HAND_WRITTEN,
    HAND_WRITTEN_MULTI_STEPS,
    HAND_WRITTEN_SCAN,
    OURS_PARAMS_SHARDED,
    OURS_REPLICATED,
    OURS_SHARDED,
)
from benchmarks.floor import least_bytes, measure_bandwidth
from benchmarks.given_gradients import given_gradients
from benchmarks.imports import WITH, WITHOUT
from benchmarks.interleave import interleave
from benchmarks.jax_baselines import hand_written, ours
from benchmarks.models import mlp, scanned, transformer
from benchmarks.options import BENCHES
from benchmarks.overhead import BARE, CALLED
from benchmarks.peer import Peer, PeerError
from benchmarks.peers import ranks
from benchmarks.result import Result
from benchmarks.tables import make_tables
from benchmarks.timing import Timing
from crossshard.distributed.launcher import TUNABLES

ROOT = Path(__file__).parents[2]


@pytest.mark.deep
@pytest.mark.parametrize("bench", BENCHES)
def test_a_bench_leaves_a_page_and_its_times(
    bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "new" / "folder"
    words = [bench, "--quick", "--rounds", "2", "--shards", "2", "--out", str(out)]
    assert main([*words, "--peers", str(tmp_path)]) == 0
    page = (out / f"{bench}.md").read_text(encoding="utf-8")
    assert "Run with `--quick`" in page
    assert f"JAX {jax.__version__}" in page or jax.__version__ in page
    times = json.loads((out / f"{bench}.json").read_text(encoding="utf-8"))
    for result in times["results"]:
        assert all(len(seconds) == 2 for seconds in result["timing"]["seconds"].values())
    printed = capsys.readouterr()
    assert str(out) in printed.out
    left_out = re.findall(
        r"Left out: (?:PyTorch|TensorFlow), since", printed.out + printed.err + page
    )
    # A peer that is not there is said to be missing, and has no row.
    assert bool(left_out) == (bench in ("update", "processes"))
    assert "gloo" not in page.split("## How it was measured")[0]


@pytest.mark.deep
@pytest.mark.parametrize("shards", [1, 8])
def test_candidates_solve_the_same(shards: int):
    for problem in (
        given_gradients(3, 64, shards),
        mlp(20_000, shards),
        transformer(shards, layers=1, width=32),
    ):
        candidates = [
            ours(problem, shards, "sharded"),
            ours(problem, shards, "replicated"),
            ours(problem, shards, "auto"),
            hand_written(problem, shards),
        ]
        timing, differences = interleave(candidates, 2, lambda _: None)
        assert set(timing.seconds) == {candidate.name for candidate in candidates}
        assert max(differences.values()) < 1e-5


def test_all_processes_take_memory_as_those_of_the_launcher_do():
    # The peers' environments lack crossshard, so the value stands there a second time.
    assert ranks.TUNABLES == TUNABLES


@pytest.mark.deep
def test_four_microbatches_by_hand_are_one_large_batch():
    # With SGD, where Adam would hide a sum in place of a mean.
    problem, sgd, k = mlp(1_000, 8 * accumulation.MICROBATCHES), optax.sgd(0.1), 4
    large = hand_written(problem, 8, optimizer=sgd)
    scanned = hand_written(accumulation.scanned(problem), 8, optimizer=sgd)
    multi_steps = hand_written(
        problem,
        8,
        optimizer=optax.MultiSteps(sgd, k).gradient_transformation(),
        batches=accumulation.microbatches(problem.batch, 8),
    )
    for candidate in (large, scanned, multi_steps):
        candidate.run(3)
    wanted = jax.tree.leaves(large.state[0])
    moved = jax.tree.map(lambda new, old: abs(new - old).max(), wanted, _leaves(problem))
    assert max(moved) > 1e-3
    for candidate in (scanned, multi_steps):
        for got, leaf in zip(jax.tree.leaves(candidate.state[0]), wanted, strict=True):
            np.testing.assert_allclose(got, leaf, rtol=1e-5, atol=1e-6)


def _leaves(problem: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(problem.params)]


@pytest.mark.deep
def test_accumulation_is_the_same_step_and_sends_once_where_multi_steps_sends_four_times():
    problem = transformer(2 * accumulation.MICROBATCHES, layers=1, width=32)
    candidates = accumulation.make_candidates(problem, 2)
    least = 2 * (2 - 1) / 2 * sum(leaf.nbytes for leaf in _leaves(problem))
    assert candidates[0].communication().lower_bound == least
    sent = {candidate.name: candidate.bytes_sent() / least for candidate in candidates}
    assert sent == {
        OURS_SHARDED: pytest.approx(1, rel=0.01),
        OURS_REPLICATED: pytest.approx(1, rel=0.01),
        HAND_WRITTEN_SCAN: pytest.approx(1, rel=0.01),
        HAND_WRITTEN_MULTI_STEPS: pytest.approx(4, rel=0.01),
    }
    _, differences = interleave(candidates, 2, lambda _: None)
    assert max(differences.values()) < 1e-5


def test_the_average_by_hand_follows_numpy():
    problem, decay = mlp(1_000, 2), 0.9
    candidate = hand_written(problem, 2, optimizer=optax.sgd(0.1), ema=decay)
    wanted = [leaf.astype(np.float64) for leaf in _leaves(problem)]
    for _ in range(3):
        candidate.run(1)
        params = [np.float64(leaf) for leaf in jax.tree.leaves(candidate.state[0])]
        wanted = [decay * w + (1 - decay) * p for w, p in zip(wanted, params, strict=True)]
    for got, want in zip(jax.tree.leaves(candidate.state[2]), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_sharded_average_keeps_a_slice_and_a_replicated_one_all_of_it():
    problem = mlp(20_000, 2)
    kept, bare = (ema.make_candidates(problem, 2, decay) for decay in (0.999, None))
    whole = sum(leaf.nbytes for leaf in _leaves(problem))
    more = [one.bytes_held() - other.bytes_held() for one, other in zip(kept, bare, strict=True)]
    # Vectors are not split.
    assert more == [pytest.approx(whole / 2, rel=0.02), whole, whole]
    assert [one.name for one in bare] == [ema.without_average(one.name) for one in kept]


@pytest.mark.deep
def test_sharded_parameters_are_the_same_step_in_fewer_bytes():
    problem = scanned(4, layers=2, width=128)
    candidates = parts.make_candidates(problem, 4)
    whole = sum(leaf.nbytes for leaf in _leaves(problem))
    got = {each.name: each.bytes_of_parameters() / whole for each in candidates}
    assert got == {
        OURS_PARAMS_SHARDED: 1 / 4,
        OURS_SHARDED: 1,
        OURS_REPLICATED: 1,
        HAND_WRITTEN: 1,
        # The embedding is too small for it.
        GSPMD: pytest.approx(1 / 4, rel=0.5),
    }
    _, differences = interleave(candidates, 2, lambda _: None)
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
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert "Traceback" not in printed.err + printed.out


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["ema", "--out", str(file / "below")]) == 2
    assert "file" in capsys.readouterr().err


def _result(seconds: dict[str, list[float]], **more: Any) -> Result:
    differences = dict.fromkeys(seconds, 0.0)
    return Result("a problem", 1000, 8, Timing(1, seconds), differences, **more)


def test_the_update_is_compared_with_each_candidate_and_with_the_floor():
    seconds = {OURS_SHARDED: [0.010, 0.020, 0.030], "theirs": [0.050, 0.040, 0.060]}
    (table,) = make_tables("update", [_result(seconds, floor_bytes=10**7, bandwidth=2e9)])
    assert "lower bound 5.00 ms at 2.0 GB/s" in table.title
    ours_, theirs = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (ours_["ms per step"], ours_["÷ lower bound"], ours_["minimum ÷ lower bound"]) == (
        "20.0",
        "4.0",
        "2.0",
    )
    assert (theirs["ms per step"], theirs["÷ lower bound"]) == ("50.0", "10.0")
    # Round by round 1/5, 1/2, 1/2; of the best rounds 10/40.
    assert (theirs["ours ÷ this"], theirs["minimum"], theirs["ratio of the minima"]) == (
        "0.50",
        "0.20",
        "0.25",
    )


def test_an_average_costs_the_step_with_it_less_the_one_without():
    names = (OURS_SHARDED, OURS_REPLICATED, HAND_WRITTEN)
    seconds = {name: [0.035, 0.055] for name in names}
    seconds |= {ema.without_average(name): [0.020, 0.030] for name in names}
    held = dict.fromkeys(seconds, 3_000_000) | dict.fromkeys(names, 5_000_000)
    (table,) = make_tables("ema", [_result(seconds, held=held)])
    assert [row[0] for row in table.rows] == list(names)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["average costs, ms"], row["difference of the minima"]) == ("20.0", "15.0")
    assert (row["MB of state on one shard"], row["MB of average"]) == ("5.00", "2.00")


@pytest.mark.parametrize(
    ("bench", "more", "less", "unit"),
    [("overhead", CALLED, BARE, 1e-6), ("import", WITH, WITHOUT, 1e-3)],
)
def test_what_ours_costs_beyond_is_ours_less_the_other(
    bench: Any, more: str, less: str, unit: float
):
    seconds = {more: [30 * unit, 50 * unit], less: [20 * unit, 30 * unit]}
    (table,) = make_tables(bench, [_result(seconds)])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row[less], row[more], row["difference"], row["difference of the minima"]) == (
        "25",
        "40",
        "15",
        "10",
    )


def test_a_peer_that_ends_is_named_with_its_last_words():
    # Our own interpreter has no torch.
    with (
        Peer("Theirs", Path(sys.executable), "torch_peer.py", {"scales": []}) as peer,
        pytest.raises(PeerError, match=r"Theirs, which ended too early: .*torch"),
    ):
        peer.versions()


def test_a_bench_that_there_is_not_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main(["nothing"])
    assert leaving.value.code == 2
    printed = capsys.readouterr()
    assert "nothing" in printed.err
    assert printed.out == ""


@pytest.mark.deep
def test_a_page_that_cannot_be_written_after_the_measuring_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # A folder where the file has to go.
    (tmp_path / "processes.json").mkdir()
    words = ["processes", "--quick", "--rounds", "2", "--shards", "2", "--peers", str(tmp_path)]
    assert main([*words, "--out", str(tmp_path)]) == 1
    assert f"Cannot write to {tmp_path}: Is a directory" in capsys.readouterr().err
