"""How long it takes from the death of a process to the next step, in parts.

`python -m benchmarks.restarts`: four processes of `examples.byte_lm` train under `crossshard
launch`, and one of them is killed again and again.
"""

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import markdown
from benchmarks.machine import this_machine

PROCESSES, EVERY = 4, 5
# How long a line may not come, in seconds.
PATIENCE = 300.0
# What ends each part: the lines of the new run, in their order.
PARTS = {
    "noticed, the others ended": r"crossshard: started again",
    "Python and the script started": r"\[0\] crossshard \d",
    "step traced, connected": r"\[0\] \[Gloo\]",
    "state restored": r"\[0\] .*is restored",
    "a step taken": r"trains again after",
}
# What a run has: its flags of `crossshard launch`, and of the example.
WAYS = {
    "checkpoints on disk": ([], ["--save-every", "50"]),
    "snapshots in memory": ([], ["--memory-every", str(EVERY)]),
    "and spare processes": (["--spares", str(PROCESSES)], ["--memory-every", str(EVERY)]),
}
_COLORS = ("#5b6b7d", "#8ecae6", "#ffd28a", "#95d5b2", "#e07a5f")


class Run:
    """A run whose lines are read as they come, with the seconds at which they came."""

    def __init__(
        self, words: Sequence[object], environment: dict[str, str] | None = None, restarts: int = 0
    ):
        launch = [sys.executable, "-m", "crossshard.tools.cli", "launch", "-n", PROCESSES]
        launch += ["--cpu-devices", 1, "--restarts", restarts, *words]
        self.process = subprocess.Popen(
            list(map(str, launch)),
            env=environment,
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
        """All lines so far."""
        return "".join(line for _, line in self.lines)

    def wait_for(self, pattern: str, since: int, seconds: float = PATIENCE) -> bool:
        """Wait for a line after some lines; return whether it came in time, and before the end."""
        until = time.monotonic() + seconds
        while not any(re.search(pattern, line) for _, line in self.lines[since:]):
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def parts(self, began: float, since: int) -> dict[str, float]:
        """The seconds of each part after a death, given the lines that came before it."""
        found = {}
        for part, pattern in PARTS.items():
            came = [at for at, line in self.lines[since:] if re.search(pattern, line)]
            if came:
                found[part], began = came[-1] - began, came[-1]
        return found

    def processes(self) -> list[int]:
        """The ids of the processes that run the example, of spare ones too."""
        found = []
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        # What has ended meanwhile, the launcher too, runs nothing.
        with contextlib.suppress(OSError):
            for pid in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    if b"examples.byte_lm" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return found

    def end(self) -> None:
        """Kill the launcher, if it has not ended, with all that it has started."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def main(kills: int = 10, out: Path | None = None) -> None:
    """How long it takes from the death of a process to the next step, in parts.

    Args:
      kills: deaths of each kind of run.
      out: write a page, such as docs/benchmarks/x.md.
    """
    machine = this_machine()
    rows, medians = [], dict[str, dict[str, float]]()
    for name, (flags, words) in WAYS.items():
        parts, lost = measured(kills, flags, words)
        medians[name] = {part: statistics.median(each[part] for each in parts) for part in PARTS}
        totals = [sum(each.values()) for each in parts]
        median, most = np.percentile(totals, [50, 95])
        cells = [f"{medians[name][part]:.1f}" for part in PARTS]
        rows.append([name, *cells, f"**{median:.1f}**", f"{most:.1f}", f"{np.median(lost):g}"])
        print(" | ".join(rows[-1]), flush=True)
    head = ("run with", *PARTS, "in all", "95%", "steps done again")
    if out is not None:
        draw(medians, out.with_suffix(".svg"))
    last = markdown.measured_on(machine, f"python -m benchmarks.restarts --kills {kills}")
    markdown.publish("restarts", [markdown.table(head, rows)], last, out)


def measured(
    kills: int, flags: Sequence[str], words: Sequence[str]
) -> tuple[list[dict[str, float]], list[int]]:
    """The seconds of each part for each death, and how many steps were done again."""
    rng, found = np.random.default_rng(0), list[dict[str, float]]()
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        example = [sys.executable, "-m", "examples.byte_lm", "--steps", 1_000_000, "--resume"]
        example += ["--out", f"{folder}/out", "--batch", 8, "--layers", 1, "--width", 32, *words]
        if "--memory-every" in words:
            example += ["--memory", f"{folder}/memory"]
        run = Run([*flags, "--", *example], restarts=kills)
        try:
            known = 0
            for _ in range(kills):
                # The first steps of the new run, and what spare processes import.
                assert run.wait_for(r"step +\d+/|trains again", known), run.printed()
                time.sleep(15 + rng.uniform(0, 1))
                known, began = len(run.lines), time.monotonic()
                os.kill(run.processes()[int(rng.integers(PROCESSES))], signal.SIGKILL)
                assert run.wait_for("trains again after", known), run.printed()
                found.append(run.parts(began, known))
        finally:
            run.end()
    lost = re.findall(r"trains again after .*: (\d+) steps? w", run.printed())
    return found, list(map(int, lost))


def draw(medians: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the parts, as bars with a common scale."""
    # Tests use the runs, and draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes, began = figure.add_subplot(), np.zeros(len(medians))
    for color, part in zip(_COLORS, PARTS, strict=True):
        seconds = [parts[part] for parts in medians.values()]
        axes.barh(list(medians), seconds, left=began, color=color, label=part)
        began += seconds
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    markdown.command(main)
