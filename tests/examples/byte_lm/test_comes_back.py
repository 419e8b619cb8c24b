"""Runs under ``crossshard launch`` that are killed go on out of memory, and lose no bit."""

import collections
import contextlib
import glob
import os
import re
import resource
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.restarts import EVERY, PROCESSES, Run
from tests.examples.byte_lm.small import COMMAND, SMALL, bare_environment, small_text
from tests.examples.byte_lm.test_chaos import arrays, sha256

# More steps than a run takes until it is told to end.
MOST = 10**6
PATIENCE = 300
# Imported by Python itself when a process starts: it raises wherever it is, once it is told to.
RAISES = """
import signal

def fail(*_):
    raise RuntimeError("something is wrong")

signal.signal(signal.SIGUSR1, fail)
"""
WAYS = {
    f"{optimizer}, {name}": ["--optimizer", optimizer, *words.split()]
    for optimizer in ("adamw", "muon")
    for name, words in {
        "replicated": "--weight-update replicated",
        "sharded": "--weight-update sharded",
        "parameters sharded": "--params sharded",
    }.items()
}


def started(folder: Path, steps: int, restarts: int, *words: str) -> Run:
    """A run; if it may be started again, one with snapshots and spare processes."""
    folder.mkdir()
    # The disk has nothing before the end: whatever is restored was in memory.
    words = ("--steps", str(steps), "--save-every", str(steps), "--resume", *SMALL, *words)
    options = ["--data", small_text(folder), "--out", folder / "out", "--batch", 8, *words]
    if restarts:
        options += ["--memory", folder / "memory", "--memory-every", EVERY]
    spares = ["--spares", PROCESSES] if restarts else []
    environment = bare_environment()
    (folder / "sitecustomize.py").write_text(RAISES)
    environment["PYTHONPATH"] += f"{os.pathsep}{folder}"
    return Run([*spares, "--", *COMMAND, *options], environment, restarts)


def newest(folder: Path) -> int:
    """The number of the checkpoint that a run has ended with."""
    return max(
        int(path.name) for path in (folder / "out" / "checkpoints").iterdir() if path.is_dir()
    )


def snapshots(memory: Path) -> set[str]:
    """The names of the snapshots that a run has written."""
    # Path.glob raises if the run deletes one meanwhile.
    return {os.path.dirname(file) for file in glob.glob(f"{memory}/*/*.json")}


def goes_on(memory: Path) -> bool:
    """Whether a run soon takes another snapshot."""
    before, until = snapshots(memory), time.monotonic() + 5
    while time.monotonic() < until and snapshots(memory) <= before:
        time.sleep(0.05)
    return not snapshots(memory) <= before


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def fail(pid: int) -> None:
    os.kill(pid, signal.SIGUSR1)


def limit(pid: int) -> None:
    """Give a process no more memory than it has."""
    now = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (now, most))


def lift_limit(pid: int) -> None:
    """Give a process as much memory as it may have."""
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (most, most))


# What is done, in turn; a process that stands still costs two minutes.
HOW = (kill, kill, fail, kill, kill, limit, kill, fail)


def disturb(run: Run, rng: np.random.Generator, how: Callable[[int], None]) -> None:
    """Do that to one process or two at once; any may be meant, the first and a spare one too."""
    there = run.processes()
    number = min(len(there), int(rng.integers(1, 3)))
    for pid in rng.choice(there, number, replace=False) if number else ():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            how(int(pid))


@pytest.mark.soak
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_killed_goes_on_with_the_same_bits(
    way: str, tmp_path: Path, tell, soak_steps
):
    kills = max(1, soak_steps // 600)
    rng = np.random.default_rng(17 + list(WAYS).index(way))
    run = started(tmp_path / "run", MOST, 10 * kills, *WAYS[way])
    ends = collections.Counter[str]()
    memory = tmp_path / "run" / "memory"
    parts: dict[str, list[float]] = {}
    try:
        until = time.monotonic() + PATIENCE
        while not snapshots(memory):
            assert time.monotonic() < until, run.printed()
            time.sleep(0.02)
        for number in range(kills):
            time.sleep(rng.uniform(0, 1))
            known, began = len(run.lines), time.monotonic()
            how = HOW[number % len(HOW)]
            disturb(run, rng, how)
            if not run.wait_for("started again", known, 5):
                if goes_on(memory):
                    # Only spare ones were meant, or the memory that there is suffices.
                    continue
                # One that gets no thread stands still; it is ended for that.
                assert run.wait_for("started again", known), run.printed()
            ends[how.__name__] += 1
            if number % 4 == 3:
                # Once more, while it comes back.
                time.sleep(rng.uniform(0, 2))
                disturb(run, rng, kill)
            assert run.wait_for("trains again after", known), run.printed()
            for part, taken in run.parts(began, known).items() if how is kill else ():
                parts.setdefault(part, []).append(taken)
        assert goes_on(memory), run.printed()
        for pid in run.processes():
            lift_limit(pid)
        run.process.terminate()
        assert run.process.wait(PATIENCE) == 0, run.printed()
    finally:
        run.end()
    printed, steps = run.printed(), newest(tmp_path / "run")
    told = re.findall(r"trains again after ([\d.]+) seconds, from (\w+).*: (\d+) steps? w", printed)
    assert {source for _, source, _ in told} <= {"Snapshot"}, printed
    seconds, lost = [float(each) for each, *_ in told], [int(each) for *_, each in told]
    # A kill while one is written costs those since the one before it.
    assert max(lost, default=0) <= 2 * EVERY, printed
    assert not memory.exists() or list(memory.iterdir()) == []
    # The first of these steps as a run that nobody disturbs.
    whole = started(tmp_path / "whole", steps, 0, *WAYS[way])
    try:
        assert whole.process.wait(PATIENCE) == 0, whole.printed()
    finally:
        whole.end()
    one, other = (sha256(arrays(tmp_path / each / "out", steps)) for each in ("run", "whole"))
    tell(f"{way}: {dict(ends)} ended it, {len(told)} times told in {steps} steps")
    tell(f"steps done again: {sorted(lost)}")
    if seconds:
        of_all = np.percentile(seconds, [50, 95])
        tell("seconds to the next step, median and 95%: {:.1f} {:.1f}".format(*of_all))
        told_parts = {part: round(statistics.median(x), 1) for part, x in parts.items()}
        tell(f"of which, at the median: {told_parts}")
    tell(f"sha256 of the state, killed and undisturbed: {one[:16]} {other[:16]}")
    assert one == other
