"""The command as a process with nothing set: in a pipe, in a terminal, interrupted."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.examples.byte_lm.small import (
    COMMAND,
    PATIENCE,
    SMALL,
    bare_environment,
    read_metrics,
    run,
    small_text,
    summary_of,
)


@pytest.mark.deep
def test_in_a_pipe_it_prints_lines_and_leaves_files(tmp_path):
    data = small_text(tmp_path)
    done = subprocess.run(
        [*COMMAND, "--data", data, *SMALL, "--steps", "60"],
        cwd=tmp_path,
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    for said in (
        r"8 virtual CPU devices: local gradient → mean over all shards",
        r"adamw, learning rate 0\.002 \(default\)",
        r"step +1/60 +loss 5\.\d+ +\d\.\d+ bits/byte",
        r"step 60/60 .* tokens/s +00:00 left",
        r"held-out +\d\.\d+ bits per byte; gzip -9 needs \d\.\d+ for the same",
        r"adamw +no parameter differs by more than \d\.\de-\d\d",
        r"sgd +crossshard\.verify: fine: on 8 shards and 16 rows",
        r"So 8 shards trained as one does, but for rounding",
    ):
        assert re.search(said, done.stdout), said

    (out,) = (tmp_path / "runs").iterdir()
    names = ["curves.png", "metrics.jsonl", "options.json", "summary.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    metrics = read_metrics(out)
    assert [line["step"] for line in metrics] == list(range(1, 61))
    assert all(len(line["loss_per_shard"]) == 8 for line in metrics)
    assert metrics[-1]["bits_per_byte"] < metrics[0]["bits_per_byte"] - 1
    looks = [line["held_out_bits_per_byte"] for line in metrics if "held_out_bits_per_byte" in line]
    assert len(looks) >= 10
    summary = summary_of(out, "finished")
    assert summary["proof"]["optimizer"] == "adamw"
    assert summary["verification"]["faults"] == []
    assert json.loads((out / "options.json").read_text())["steps"] == 60


@pytest.mark.deep
def test_in_a_terminal_a_bar_moves_until_ctrl_c_and_everything_is_written(tmp_path):
    data, out = small_text(tmp_path), tmp_path / "out"
    ours, theirs = pty.openpty()
    # Only the terminal that controls a process turns a typed Ctrl-C into a signal for it.
    controlled = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
    words = [*COMMAND, "--data", data, *SMALL, "--steps", "1000000", "--out", out]
    process = subprocess.Popen(
        [sys.executable, "-c", controlled, *words], stdin=theirs, env=bare_environment()
    )
    os.close(theirs)
    until = time.monotonic() + PATIENCE
    shown, typed = "", False
    while (more := read_terminal(ours, until)) is not None:
        shown += more
        if not typed and len(set(steps_drawn(shown))) > 3:
            os.write(ours, b"\x03")
            typed = True
    os.close(ours)
    assert process.wait(PATIENCE) == 128 + signal.SIGINT, shown
    # The cursor is there again.
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    plain = without_escapes(shown)
    assert max(steps_drawn(shown)) > 3
    metrics = read_metrics(out)
    bar = r"\d+/1000000 [━╸╺]+ loss \d\.\d{3}  \d\.\d{3} bits/byte \S+ tokens/s \S+ left"
    assert re.search(bar, plain), plain
    assert re.search(rf"stopped +after {len(metrics):,} steps, as you asked", plain)
    assert "not run, since the training did not finish" in plain
    assert summary_of(out)["held_out_bits_per_byte"]


def read_terminal(ours: int, until: float) -> str | None:
    """What has come by now; ``None`` when the other end has closed."""
    assert time.monotonic() < until
    if not select.select([ours], [], [], 1)[0]:
        return ""
    try:
        return os.read(ours, 65536).decode(errors="replace") or None
    except OSError:  # how Linux says it
        return None


def without_escapes(shown: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)


def steps_drawn(shown: str) -> list[int]:
    return [int(number) for number in re.findall(r"(\d+)/1000000 ", without_escapes(shown))]


def test_a_run_that_diverges_ends_there_and_says_so(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(tmp_path, "out", "--shards", 2, "--optimizer", "sgd", "--learning-rate", 1e30) == 1
    assert "is not finite: the run diverged" in capsys.readouterr().out
    metrics = read_metrics(out)
    assert len(metrics) < 10
    assert metrics[-1]["loss"] is None
    summary_of(out, "not finite")


@pytest.mark.soak
def test_a_long_run_on_virtual_devices_ends_with_nothing_set(tmp_path, soak_steps):
    data = small_text(tmp_path)
    done = subprocess.run(
        [*COMMAND, "--data", data, *SMALL, "--steps", str(soak_steps), "--out", "out"],
        cwd=tmp_path,
        env=bare_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(tmp_path / "out")) == soak_steps
