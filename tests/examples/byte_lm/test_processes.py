"""The command in several processes: what they train, who writes, and how they stop together."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.examples.byte_lm.small import (
    PATIENCE,
    read_metrics,
    start,
    summary_of,
    wait_for_steps,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.deep]


def lines_of(own: int, text: str) -> list[str]:
    """The lines of a process, but for those of the collectives' own library."""
    prefix = f"[{own}] "
    ours = (line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix))
    # Several threads of it write parts of lines at once.
    return [line for line in ours if not re.search(r"Gloo|Rank|peer ranks|^[\s\d:]*$", line)]


def test_processes_train_as_one_does(tmp_path: Path):
    words = "--shards 4 --optimizer sgd --weight --batch 13 --accumulate-steps 2".split()
    launch = ["-n", "2", "--cpu-devices", "2"]
    ran = start(tmp_path, *words, "--steps", "6", out="many", launch=launch)
    out, err = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, err
    assert err == ""
    alone = start(tmp_path, *words, "--steps", "6", out="one")
    assert alone.communicate(timeout=PATIENCE)[1] == ""
    many, one = (read_metrics(tmp_path / name) for name in ("many", "one"))
    assert [step["loss"] for step in many] == pytest.approx([s["loss"] for s in one], rel=1e-6)
    for ours, theirs in zip(many, one, strict=True):
        assert ours["loss_per_shard"] == pytest.approx(theirs["loss_per_shard"], rel=1e-5)
        bits = "held_out_bits_per_byte"
        assert ours.get(bits, 0) == pytest.approx(theirs.get(bits, 0), rel=1e-5)
    summary = summary_of(tmp_path / "many", "finished")
    assert summary["proof"]["same"]
    assert summary["verification"]["faults"] == []
    # Process 0 prints, the others are silent.
    assert "virtual CPU devices in 2 processes" in "\n".join(lines_of(0, out))
    assert lines_of(1, out) == []


def started_by(pid: int) -> list[int]:
    """The process ids of what a process has started that trains."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    is_ours = lambda child: b"examples.byte_lm" in Path(f"/proc/{child}/cmdline").read_bytes()
    return [int(child) for child in found if is_ours(child)]


@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGINT, "all"), (signal.SIGTERM, "the last")],
)
def test_all_processes_stop_after_the_same_step(tmp_path: Path, number: signal.Signals, to: str):
    ran = start(tmp_path, "--steps", "1000000", launch=["-n", "2"])
    wait_for_steps(ran, tmp_path / "out")
    os.kill(ran.pid if to == "all" else started_by(ran.pid)[-1], number)
    out, err = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 128 + number, err
    summary = summary_of(tmp_path / "out")
    assert summary["held_out_bits_per_byte"]
    why = ", as you asked" if number == signal.SIGINT else f", by {number.name}"
    assert f"after {summary['steps']:,} steps{why}" in out
    assert lines_of(0, err) == lines_of(1, err) == []


def test_shards_that_the_processes_cannot_share_are_refused(tmp_path: Path):
    ran = start(tmp_path, "--shards", "4", launch=["-n", "3"])
    out, err = ran.communicate(timeout=PATIENCE)
    assert (ran.returncode, out) == (2, "")
    assert "4 shards cannot be split evenly over 3 processes. Pass --shards 12" in err
    assert not (tmp_path / "out").exists()
