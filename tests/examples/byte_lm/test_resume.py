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
@pytest.mark.parametrize(
    ("number", "keeps"),
    [
        (signal.SIGTERM, "--save-every 4 --ema 0.9"),
        (signal.SIGKILL, "--save-every 4 --ema 0.9"),
        (signal.SIGKILL, "--save-every 1000 --memory memory --memory-every 3"),
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(
    tmp_path: Path,
    number: signal.Signals,
    keeps: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    out, whole, memory = (tmp_path / name for name in ("out", "whole", "memory"))
    words, in_memory = ["--shards", "2", *keeps.split()], "--memory" in keeps
    process = start(tmp_path, "--steps", "1000000", *words)
    wait_for_steps(process, out, 10)
    process.send_signal(number)
    printed = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == (0 if number == signal.SIGTERM else -number)
    snapshots = [int(path.parent.name[:8]) for path in memory.glob("*/*.json")]
    saved = max(snapshots) if in_memory else numbers(out)[-1]
    if number == signal.SIGTERM:
        assert saved == len(read_metrics(out))
        assert f"Saved after step {saved}: --resume goes on from there." in printed
    steps = saved + 3
    assert run(tmp_path, "out", "--steps", steps, *words, "--resume") == 0
    source = f"Snapshot {saved} in {memory}" if in_memory else f"Checkpoint {saved} in {out}"
    assert source in " ".join(capsys.readouterr().out.split())
    assert run(tmp_path, "whole", "--steps", steps, *words) == 0
    assert values(out) == values(whole)
    assert saved_hashes(out, steps) == saved_hashes(whole, steps)
    # What the last checkpoint has as well does not stay.
    assert not in_memory or list(memory.iterdir()) == []


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
