"""--save-every and --resume: a run that was interrupted goes on as if it had not been."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.examples.byte_lm.small import (
    PATIENCE,
    numbers,
    read_metrics,
    run,
    saved_hashes,
    start,
    wait_for_steps,
)


def values(out: Path) -> list[dict[str, Any]]:
    """What does not depend on the clock, nor on how many steps there are to come."""
    leave = ("seconds", "tokens_per_second", "held_out")
    return [
        {k: v for k, v in step.items() if not k.startswith(leave)} for step in read_metrics(out)
    ]


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, number: signal.Signals):
    words = ["--shards", "2", "--save-every", "4", "--ema", "0.9"]
    process = start(tmp_path, "--steps", "1000000", *words)
    wait_for_steps(process, tmp_path / "out", 10)
    process.send_signal(number)
    printed = process.communicate(timeout=PATIENCE)[0]
    saved = numbers(tmp_path / "out")[-1]
    if number == signal.SIGTERM:
        assert process.returncode == 0
    else:
        assert process.returncode == -number
    if number != signal.SIGKILL:
        assert saved == len(read_metrics(tmp_path / "out"))
        assert f"Saved after step {saved}: --resume goes on from there." in printed
    steps = saved + 3
    assert run(tmp_path, "out", "--steps", steps, *words, "--resume") == 0
    assert run(tmp_path, "whole", "--steps", steps, *words) == 0
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert values(out) == values(whole)
    assert saved_hashes(out, steps) == saved_hashes(whole, steps)


@pytest.mark.deep
def test_a_killed_run_goes_on_from_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    memory = tmp_path / "memory"
    words = [
        "--shards",
        "2",
        "--save-every",
        "1000",
        "--memory",
        str(memory),
        "--memory-every",
        "3",
    ]
    process = start(tmp_path, "--steps", "1000000", *words)
    wait_for_steps(process, tmp_path / "out", 10)
    process.kill()
    process.communicate(timeout=PATIENCE)
    kept = max(int(path.parent.name[:8]) for path in memory.glob("*/*.json"))
    steps = kept + 2
    assert run(tmp_path, "out", "--steps", steps, *words, "--resume") == 0
    assert f"Snapshot {kept} in {memory} is restored" in " ".join(capsys.readouterr().out.split())
    assert run(tmp_path, "whole", "--steps", steps, *words[:4]) == 0
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert values(out) == values(whole)
    assert saved_hashes(out, steps) == saved_hashes(whole, steps)
    # What the last checkpoint has as well does not stay.
    assert list(memory.iterdir()) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run ``out`` was saved, for those that may not go on with it."""
    folder = tmp_path_factory.mktemp("saved")
    assert run(folder, "out", "--steps", 2, "--shards", 2, "--save-every", 1) == 0
    return folder


@pytest.mark.deep
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "1"], "drew batches with seed 0, and this one would with 1"),
        (["--width", "64"], "is not of this step"),
    ],
)
def test_another_run_is_refused(
    saved: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
):
    before = (saved / "out" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert run(saved, "out", "--steps", 4, "--shards", 2, "--resume", *words) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert (saved / "out" / "metrics.jsonl").read_bytes() == before
