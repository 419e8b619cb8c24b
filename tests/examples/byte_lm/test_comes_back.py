"""Runs under ``crossshard launch`` that are killed go on out of memory, and lose no bit."""

import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.examples.byte_lm.small import COMMAND as BYTE_LM
from tests.examples.byte_lm.small import LAUNCH, ROOT, SMALL, bare_environment, small_text
from tests.examples.byte_lm.test_chaos import arrays, sha256

PROCESSES, EVERY = 4, 5
# Steps before the first kill, between one and the next, and after the last.
SOME = 80
PATIENCE = 300
WAYS = {
    f"{optimizer}, {name}": ["--optimizer", optimizer, *words.split()]
    for optimizer in ("adamw", "muon")
    for name, words in {
        "replicated": "--weight-update replicated",
        "sharded": "--weight-update sharded",
        "parameters sharded": "--params sharded",
    }.items()
}
# The lines that a run says when it has come so far, in their order.
PARTS = {
    "noticed and ended": r"crossshard: started again",
    "imported": r"\[0\] crossshard \d",
    "connected": r"\[0\] \[Gloo\]",
    "restored": r"\[0\] .*is restored",
    "trains": r"trains again after",
}


class Run:
    """A run whose lines are read as they come, with the seconds at which they came."""

    def __init__(self, folder: Path, steps: int, restarts: int, *words: str):
        self.out, self.memory = folder / "out", folder / "memory"
        folder.mkdir(exist_ok=True)
        launch = ["-n", PROCESSES, "--cpu-devices", 1, "--restarts", restarts, "--spares"]
        launch += [PROCESSES if restarts else 0, "--", *BYTE_LM, "--data", small_text(folder)]
        # The disk has nothing before the end: whatever is restored was in memory.
        options = ["--steps", steps, "--save-every", steps, "--out", self.out, "--resume"]
        options += ["--shards", PROCESSES, "--batch", 8, *SMALL, *words]
        if restarts:
            options += ["--memory", self.memory, "--memory-every", EVERY]
        self.process = subprocess.Popen(
            [*map(str, [*LAUNCH, *launch, *options])],
            cwd=ROOT,
            env=bare_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def printed(self) -> str:
        return "".join(line for _, line in self.lines)

    def wait_for(self, pattern: str, since: int, seconds: float = PATIENCE) -> bool:
        """Wait for a line after some lines; return whether it came in time, and before the end."""
        until = time.monotonic() + seconds
        while not any(re.search(pattern, line) for _, line in self.lines[since:]):
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def processes(self) -> list[int]:
        """The ids of the processes that train, or are about to, in their order."""
        found = {}
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in map(int, path.read_text().split()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                tells = Path(f"/proc/{pid}/task").exists() and b"examples.byte_lm" in words
            except OSError:
                continue
            if tells:
                found[pid] = pid
        return sorted(found)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def kill(run: Run, rng: np.random.Generator) -> str:
    """Kill one process, or two at once; any may be meant, the first one and a spare one too."""
    there = run.processes()
    number = min(len(there), int(rng.integers(1, 3)))
    for pid in rng.choice(there, number, replace=False) if number else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return f"{number} of {len(there)}"


@pytest.mark.soak
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_killed_goes_on_with_the_same_bits(
    way: str, tmp_path: Path, tell, soak_steps
):
    kills = max(1, soak_steps // 600)
    rng, steps = np.random.default_rng(17 + list(WAYS).index(way)), SOME * (kills + 2)
    run, known = Run(tmp_path / "run", steps, 10 * kills, *WAYS[way]), 0
    parts: dict[str, list[float]] = {}
    try:
        until = time.monotonic() + PATIENCE
        while not [*run.memory.glob("*/*.json")]:
            assert time.monotonic() < until, run.printed()
            time.sleep(0.02)
        for number in range(kills):
            time.sleep(rng.uniform(0, 1))
            known, began = len(run.lines), time.monotonic()
            kill(run, rng)
            if not run.wait_for("started again", known, 5):
                # Only spare ones were killed.
                continue
            if number % 4 == 3:
                # Once more, while it comes back.
                time.sleep(rng.uniform(0, 2))
                kill(run, rng)
            if not run.wait_for("trains again after", known):
                assert run.process.poll() == 0, run.printed()
                break
            before = began
            for part, pattern in PARTS.items():
                came = [at for at, line in run.lines[known:] if re.search(pattern, line)]
                if came:
                    parts.setdefault(part, []).append(came[-1] - before)
                    before = came[-1]
        assert run.process.wait(PATIENCE) == 0, run.printed()
    finally:
        run.end()
    printed = run.printed()
    told = re.findall(r"trains again after ([\d.]+) seconds, from (\w+).*: (\d+) steps? w", printed)
    assert {source for _, source, _ in told} <= {"Snapshot"}, printed
    seconds, lost = [float(each) for each, *_ in told], [int(each) for *_, each in told]
    # A kill while one is written costs those since the one before it.
    assert max(lost, default=0) <= 2 * EVERY, printed
    assert not run.memory.exists() or list(run.memory.iterdir()) == []
    whole = Run(tmp_path / "whole", steps, 0, *WAYS[way])
    try:
        assert whole.process.wait(PATIENCE) == 0, whole.printed()
    finally:
        whole.end()
    one, other = (sha256(arrays(each.out, steps)) for each in (run, whole))
    tell(f"{way}: {len(told)} deaths told in {steps} steps; steps done again {sorted(lost)}")
    if seconds:
        of_all = np.percentile(seconds, [50, 95])
        tell("seconds to the next step, median and 95%: {:.1f} {:.1f}".format(*of_all))
        told_parts = {part: round(statistics.median(x), 1) for part, x in parts.items()}
        tell(f"of which, at the median: {told_parts}")
    tell(f"sha256 of the state, killed and undisturbed: {one[:16]} {other[:16]}")
    shutil.rmtree(run.memory, ignore_errors=True)
    assert one == other
